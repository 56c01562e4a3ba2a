# shellcheck shell=bash
# What all commands share: settings, running a command or printing it, and what to do about one that failed.
#
# A setting has a name, a default and a line of help. It is given as a flag, --name=value, or as a line name=value of the file that
# --slice names; the flag wins. There is no other place where anything is remembered.

declare -gA VALUE=() HELP=()
declare -ga SETTINGS=() ARGUMENTS=()
SCRIPTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname "$SCRIPTS") # of the repository

# setting NAME DEFAULT HELP
setting() {
  SETTINGS+=("$1")
  VALUE[$1]=$2
  HELP[$1]=$3
}

# refuse MESSAGE: a mistake in flags or files
refuse() {
  echo "pod $COMMAND: $1" >&2
  exit 2
}

# read_slice NAME|FILE: the lines name=value of slices/NAME.env, or of a file of one's own
read_slice() {
  local file=$1 line key number=0
  [[ -f $file ]] || file=$SCRIPTS/slices/$1.env
  if [[ ! -f $file ]]; then
    refuse "--slice=$1: no such file, and no such slice; there are $(cd "$SCRIPTS/slices" && printf '%s ' *.env | sed 's/\.env//g')"
  fi
  while IFS= read -r line || [[ $line ]]; do
    number=$((number + 1))
    [[ $line =~ ^[[:space:]]*(#.*)?$ ]] && continue
    [[ $line =~ ^[a-z_]+= ]] || refuse "$file, line $number: expected name=value"
    key=${line%%=*}
    [[ ${HELP[$key]+x} ]] || refuse "$file, line $number: no setting '$key'; there are ${SETTINGS[*]}"
    VALUE[$key]=${line#*=}
  done <"$file"
}

# read_flags "NAME ..." FLAG...: those that the command takes, and what stands behind --
read_flags() {
  local known=$1 flag key
  local -A given=()
  shift
  while (($#)); do
    flag=$1
    shift
    case $flag in
      --) ARGUMENTS=("$@") && break ;;
      --dry-run | --dry_run | --follow) given[$(tr - _ <<<"${flag#--}")]=yes ;;
      --*=*)
        key=${flag%%=*}
        key=${key#--}
        given[${key//-/_}]=${flag#*=}
        ;;
      --*) refuse "$flag needs a value: $flag=VALUE" ;;
      *) refuse "'$flag' is no flag; the words of a trace-jax command stand behind --" ;;
    esac
  done
  for key in "${!given[@]}"; do
    [[ " $known " == *" $key "* ]] || refuse "no flag --$key; there are --${known// / --}"
  done
  if [[ ${given[slice]:-} ]]; then read_slice "${given[slice]}"; fi
  for key in "${!given[@]}"; do VALUE[$key]=${given[$key]}; done
}

# need NAME...: settings that must have a value
need() {
  local key
  for key; do
    [[ ${VALUE[$key]} ]] || refuse "--$key is missing: ${HELP[$key]}"
  done
}

# whole NAME...: settings that must be whole numbers
whole() {
  local key
  for key; do
    [[ ${VALUE[$key]} =~ ^[0-9]+$ ]] || refuse "--$key=${VALUE[$key]} is no whole number"
  done
}

# quoted WORD...: a command as it can be pasted into a shell
quoted() {
  local word line=
  for word; do
    if [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then line+=" $word"; else line+=" ${word@Q}"; fi
  done
  echo "${line# }"
}

# note TEXT: what a person wants to know; in a dry run a comment between commands
note() {
  if [[ ${VALUE[dry_run]} ]]; then echo "# $*"; else echo "$*" >&2; fi
}

# run WORD...: the command, or its line in a dry run; ends the script if it fails
run() {
  if [[ ${VALUE[dry_run]} ]]; then
    quoted "$@"
  else
    attempt "$@" || failed "$?" "$@"
  fi
}

# attempt WORD...: the command; what it writes on standard error is shown, and kept in $ERRORS
attempt() {
  { "$@" 2>&1 1>&3 3>&- 4>&- | tee "$ERRORS" >&2; } 3>&1
}

# ask ASSUMED WORD...: what a command prints, "missing" if there is no such thing, in a dry run ASSUMED
ask() {
  local assumed=$1 said code=0
  shift
  if [[ ${VALUE[dry_run]} ]]; then
    quoted "$@" >&4
    echo "$assumed"
    return
  fi
  said=$("$@" 2>"$ERRORS") || code=$?
  if ((code == 0)); then
    echo "$said"
  elif grep -qiE 'NOT_FOUND|was not found|could not fetch resource' "$ERRORS"; then
    echo missing
  else
    cat "$ERRORS" >&2
    failed "$code" "$@"
  fi
}

# chosen_revision: sets REVISION to the full hash of what is to be pushed
chosen_revision() {
  if [[ ! ${VALUE[revision]} && $(git -C "$ROOT" status --porcelain --untracked-files=no) ]]; then
    refuse "files have been changed since the last commit, and hosts get what is committed: commit them, or say --revision=HEAD"
  fi
  REVISION=$(git -C "$ROOT" rev-parse --verify --quiet "${VALUE[revision]:-HEAD}^{commit}") ||
    refuse "--revision=${VALUE[revision]:-HEAD}: git knows none in $ROOT"
}

# names_of_variables: sets NAMES to those of --env
names_of_variables() {
  local name
  IFS=, read -ra NAMES <<<"${VALUE[env]}"
  for name in "${NAMES[@]}"; do
    [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || refuse "--env: names alone, with commas between; their values are taken from here"
    [[ ${!name+x} ]] || refuse "--env: $name is not set here"
  done
}

# failed CODE WORD...: says which command failed, and what to do
failed() {
  local code=$1
  shift
  {
    echo
    echo "pod $COMMAND: this command failed with exit code $code:"
    echo "    $(quoted "$@")"
    echo "fix: $(fix "$code" "$1" "$(cat "$ERRORS")")"
  } >&2
  exit 1
}

# fix CODE PROGRAM ERRORS: what to do, told from what a command said
fix() {
  local code=$1 program=$2 said=$3
  local project=${VALUE[project]:-PROJECT}
  shopt -s nocasematch
  if [[ $program == "${VALUE[docker]}" && $said =~ denied|"no basic auth"|unauthenticated ]]; then
    echo "gcloud auth configure-docker ${VALUE[image]%%/*}; the repository must exist, and you need roles/artifactregistry.writer on it"
    return
  fi
  case $said in
    *"on_host: "*) echo "what the host says, above" ;;
    *"on_host.sh: No such file"*) echo "tpu_scripts/pod setup" ;;
    *"$program: command not found"*) echo "install $program and put it on the PATH" ;;
    *"command not found"*) echo "install what the message names, where it was missing" ;;
    *"active account"* | *UNAUTHENTICATED* | *reauth* | *"application default credentials"*)
      echo "gcloud auth login, and gcloud config set project $project" ;;
    *SERVICE_DISABLED* | *"has not been used in project"* | *"API has not been enabled"*)
      echo "gcloud services enable tpu.googleapis.com compute.googleapis.com container.googleapis.com --project=$project" ;;
    *PERMISSION_DENIED* | *"permission denied"* | *"does not have permission"* | *Forbidden* | *"Required '"*"' permission"*)
      echo "gcloud auth login, or have an owner of $project grant you $ROLES" ;;
    *quota* | *RESOURCE_EXHAUSTED*)
      echo "another --zone, --provisioning=spot (its quota is another one), or ask for quota at IAM & Admin > Quotas" ;;
    *"no more capacity"* | *STOCKOUT* | *"does not have enough resources"* | *ZONE_RESOURCE_POOL_EXHAUSTED*)
      echo "another --zone, or the same command later" ;;
    *ALREADY_EXISTS* | *"already exists"*)
      echo "it is there: tpu_scripts/pod status tells its state; for a new one another --name, or tpu_scripts/pod delete first" ;;
    *"no matches for kind"*JobSet* | *"resource type \"jobset\""*) echo "the cluster has no JobSet controller: tpu_scripts/pod setup" ;;
    *NOT_FOUND* | *"not found"* | *"could not fetch resource"*)
      echo "look at --name, --zone and --project; what is not there is made by tpu_scripts/pod create" ;;
    *INVALID_ARGUMENT* | *"invalid value"*)
      echo "does the zone have it? gcloud compute tpus accelerator-types list --zone=${VALUE[zone]:-ZONE}, or machine-types list" ;;
    *"Unable to connect to the server"* | *"connection to the server"*) echo "tpu_scripts/pod create connects kubectl with the cluster" ;;
    *"Connection "*timed* | *"Connection "*refused* | *"Connection "*closed* | *"port 22"* | *"ssh: "* | *"Host key"*) fix_ssh ;;
    *"No space left"*) echo "make room on the disk that the message names" ;;
    *"Cannot connect to the Docker daemon"*) echo "start docker, or give --docker=podman" ;;
    *)
      if ((code == 255)); then
        fix_ssh
      else
        echo "the reason stands above; tpu_scripts/pod status and tpu_scripts/pod logs tell more of the hosts"
      fi
      ;;
  esac
  shopt -u nocasematch
}

fix_ssh() {
  echo "is it up? tpu_scripts/pod status. If it is: let port 22 through the firewall, or, from within its network, give" \
    "--ssh_flags=--internal-ip; with several hosts first ssh-add ~/.ssh/google_compute_engine"
}
