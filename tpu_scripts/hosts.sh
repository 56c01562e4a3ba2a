# shellcheck shell=bash
# The commands for machines that are reached by ssh. tpu.sh and gpu.sh give pod_create, pod_state, pod_show, pod_revive, pod_delete,
# on_hosts and to_hosts.

# host VERB WORD...: a line for the shell of a host
host() { echo "bash on_host.sh $(quoted "$@")"; }

# until_ready: waits for the machines that were asked for; makes those anew that were taken away meanwhile
until_ready() {
  local deadline=$((SECONDS + 60 * ${VALUE[patience]})) state asked=0
  while :; do
    if state=$(pod_state); then
      asked=0
    elif ((++asked < 5)); then # a network may be away for a while
      state=unknown
    else
      exit 1
    fi
    case $state in
      ready)
        reach
        return
        ;;
      missing) refuse "${VALUE[name]} is not there: tpu_scripts/pod create" ;;
      gone)
        note "${VALUE[name]} was taken away"
        pod_revive
        ;;
    esac
    ((SECONDS < deadline)) || refuse "${VALUE[name]} is $state after ${VALUE[patience]} minutes; it stays asked for: tpu_scripts/pod status"
    note "${VALUE[name]}: $state"
    sleep "${VALUE[poll]}"
  done
}

# reach: a machine that has just started takes a while to listen
reach() {
  local try
  for try in {1..10}; do
    if [[ ${VALUE[dry_run]} ]]; then break; fi
    if (on_hosts true) >/dev/null 2>&1; then return; fi
    note "${VALUE[name]}: not yet reached, $try of 10"
    sleep "${VALUE[poll]}"
  done
  on_hosts true # and if it is not so, why
}

command_create() {
  pod_create
  ((${VALUE[patience]} == 0)) || until_ready
  note "next: tpu_scripts/pod setup"
}

command_push() {
  chosen_revision
  run mkdir -p -m 700 "$PRIVATE"
  run git -C "$ROOT" archive "--output=$PRIVATE/trace-jax.tar.gz" "$REVISION"
  to_hosts "$PRIVATE/trace-jax.tar.gz" "$SCRIPTS/on_host.sh"
  on_hosts "$(host unpack "$REVISION")"
}

# install: what a run needs on all hosts; ends if one does not see its chips, or the others
install() {
  need install
  on_hosts "$(host setup "${VALUE[install]}${VALUE[extras]:+,${VALUE[extras]}}" "${VALUE[python]}" "${VALUE[share]:--}")"
  if [[ ${VALUE[devices]} ]]; then
    whole devices
    on_hosts "$(host check "${VALUE[install]}" "${VALUE[hosts]}" "${VALUE[devices]}")"
  fi
}

command_setup() {
  command_push
  install
}

# hand_over: the values of --env go in a file, by name, so that they stand in no command line and no log
hand_over() {
  local file=$PRIVATE/variables line
  names_of_variables
  run mkdir -p -m 700 "$PRIVATE"
  line="(umask 077; ${NAMES[*]:+declare -p ${NAMES[*]}} >$(quoted "$file"))"
  if [[ ${VALUE[dry_run]} ]]; then echo "$line"; else eval "$line"; fi
  to_hosts "$file"
  run rm "$file"
}

command_launch() {
  local -a words=("${ARGUMENTS[@]}")
  if [[ ${VALUE[kind]} == tpu ]]; then
    words+=(--coordinator=auto)
  elif ((${VALUE[hosts]} > 1)); then
    refuse "${VALUE[hosts]} GPU machines serve rollouts; a run has one, with all its GPUs"
  fi
  hand_over
  on_hosts "$(host launch trace-jax "${words[@]}")"
}

command_logs() { on_hosts "$(host logs "${VALUE[lines]}" "${VALUE[follow]:-no}")"; }

command_status() {
  local state
  pod_show
  state=$(pod_state)
  if [[ $state == ready ]]; then on_hosts "$(host status)"; else note "no host to ask: ${VALUE[name]} is $state"; fi
}

command_stop() { on_hosts "$(host stop "${VALUE[grace]}")"; }

# ending: how the run of host 0 stands: running, its exit code, or nothing, on a host that knows of none
ending() {
  local line
  if [[ ${VALUE[dry_run]} ]]; then
    on_hosts "$(host status)" 0 >&4
    line="ended with 0"
  else
    line=$(on_hosts "$(host status)" 0) || return
  fi
  sed -nE 's/.*  ended with ([0-9]+)(  .*)?$/\1/p; s/.*  running(  .*)?$/running/p' <<<"  $line" | head -n 1
}

# watch: until the run has ended or the machines are gone; sets ENDED to its exit code, or to lost
watch() {
  local said state unheard=0
  while :; do
    if said=$(ending 2>"$ERRORS.watch"); then
      unheard=0
      case $said in
        running) ;;
        [0-9]*) ENDED=$said && return ;;
        *) ENDED=lost && return ;; # a host that knows of no run is a new one
      esac
    else # no answer: a preemption, or the way there
      state=$(pod_state) || state=unknown
      case $state in
        gone | missing) ENDED=lost && return ;;
      esac
      if ((++unheard >= 20)); then
        cat "$ERRORS.watch" >&2
        ENDED=lost
        return
      fi
    fi
    sleep "${VALUE[poll]}"
  done
}

command_resume() {
  local try futile=0 state launched=$SECONDS
  names_of_variables
  chosen_revision
  VALUE[revision]=$REVISION # all launches of a run have one
  if [[ ${VALUE[dry_run]} ]]; then
    note "where the machines were taken away:"
    pod_revive
    note "and then, or where they are there:"
  fi
  for ((try = 1; try <= ${VALUE[tries]}; try++)); do
    note "launch $try of at most ${VALUE[tries]}"
    state=$(pod_state) || state=unknown
    if [[ $state == missing ]]; then pod_create; fi
    ENDED="no launch"
    if (until_ready); then
      launched=$SECONDS
      if (launch_again); then watch; fi
    fi
    case $ENDED in
      0)
        note "the run has ended with 0"
        return
        ;;
      143 | lost) futile=0 ;;
      *) # a lease of the run before lasts a minute; what fails three times within ten minutes, fails
        ((SECONDS - launched < 600)) || futile=0
        ((++futile < 3)) || break
        ;;
    esac
    note "it has ended: $ENDED"
    sleep "${VALUE[poll]}"
  done
  (on_hosts "$(host logs 20 no)" 0) || true
  echo "pod resume: it does not go on, see the log above; fix: what its last line names, then the same command again" >&2
  exit 1
}

# launch_again: code, packages and a run on all hosts; a run that goes on is left alone
launch_again() {
  if [[ ! ${VALUE[dry_run]} && $(ending 2>/dev/null) == running ]]; then
    note "it is running"
    return
  fi
  command_push
  command_stop # what may be left on hosts that were not lost
  install
  command_launch
}

command_delete() { pod_delete; }

command_serve_rollouts() {
  [[ ${VALUE[kind]} == gpu ]] || refuse "--engine=sglang serves from GPU machines, such as --slice=rollouts-h100x8"
  need model devices
  whole devices
  place
  local machine address servers=() urls index count of='--format=value(networkInterfaces[0].networkIP)'
  count=$((${VALUE[devices]} / ${VALUE[tensor]}))
  ((count > 0)) || refuse "--tensor=${VALUE[tensor]}: a host has ${VALUE[devices]} GPUs"
  for machine in "${MACHINES[@]}"; do
    address=$(ask "ADDRESS-OF-$machine" gcloud compute instances describe "$machine" "$of" "${AT[@]}")
    [[ $address != missing ]] || refuse "$machine is not there: tpu_scripts/pod create"
    for ((index = 0; index < count; index++)); do servers+=("http://$address:$((30000 + index))"); done
  done
  hand_over
  local -a flags=("--model-path" "${VALUE[model]}" --host 0.0.0.0 --context-length "$((${VALUE[context]} + 8))"
    --max-running-requests "${VALUE[lanes]}" --dtype bfloat16 --tokenizer-worker-num 1 --tp-size "${VALUE[tensor]}")
  if ((${VALUE[rank]})); then
    flags+=(--enable-lora --lora-target-modules all --max-lora-rank "${VALUE[rank]}" --max-loras-per-batch "${VALUE[adapters]}"
      --max-loaded-loras "$((2 * ${VALUE[adapters]}))")
  fi
  local -a more=()
  read -ra more <<<"${VALUE[options]}"
  on_hosts "$(host launch servers "$count" "${VALUE[tensor]}" "${flags[@]}" "${more[@]}")"
  on_hosts "$(host router "${servers[@]}")" 0
  urls=$(IFS=, && echo "${servers[*]}")
  note "the run's flags: --config.rollout.engine=sglang --config.servers.urls=$urls"
  note "one address for OpenAI clients, the router: ${servers[0]%:*}:8000/v1"
}
