#!/usr/bin/env bash
# What runs on a host: unpacks the code, installs it, starts a command that outlives the connection, and tells how it stands.
#
# In the home folder: trace-jax/ the code, trace-jax-venv/ the packages, variables (what --env named, mode 600), and trace-jax-run/ with
# command, boot, pid, code (the exit code, when it has ended) and log, on the first of several servers also router (its pid).
set -euo pipefail
CODE=$HOME/trace-jax
VENV=$HOME/trace-jax-venv
RUN=$HOME/trace-jax-run
PAUSE=${TRACE_JAX_PAUSE:-3} # seconds: a command that ends sooner has failed at its start
export PATH=$VENV/bin:$HOME/.local/bin:$PATH

die() {
  echo "on_host: $(hostname): $1" >&2
  exit 1
}

# unpack REVISION: the code, all of it new; git wrote the revision into the archive
unpack() {
  rm -rf "$CODE.new"
  mkdir "$CODE.new"
  tar -xzf "$HOME/trace-jax.tar.gz" -C "$CODE.new"
  grep -qx "$1" "$CODE.new/REVISION" || die "what came is not revision $1; the same command again"
  rm -rf "$CODE"
  mv "$CODE.new" "$CODE"
  if [[ -s $VENV/extras ]]; then install "$(<"$VENV/extras")"; fi
}

# install EXTRA,EXTRA
install() {
  local -a more=()
  if [[ ,$1, == *,sglang,* ]]; then more=(sglang-router); fi
  uv pip install --quiet --python "$VENV/bin/python" --editable "${CODE}[$1]" "${more[@]}" ||
    die "the installation failed; the reason stands above"
  echo "$1" >"$VENV/extras"
}

# setup EXTRA,EXTRA PYTHON SHARE|-: the images' own Python may be too old, so uv brings one
setup() {
  command -v uv >/dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh ||
    die "uv could not be installed: has the host a way out? (Cloud NAT)"
  [[ -x $VENV/bin/python ]] || uv venv --quiet --python "$2" "$VENV"
  install "$1"
  if [[ $3 != - ]] && ! mountpoint -q /mnt/trace; then
    sudo apt-get install -qq -y nfs-common >/dev/null
    sudo mkdir -p /mnt/trace
    sudo mount -t nfs "$3" /mnt/trace || die "$3 could not be mounted: is it in the same network?"
    sudo chmod 1777 /mnt/trace
  fi
}

# check EXTRA HOSTS DEVICES: of a TPU slice all hosts must call at once
check() {
  if [[ $1 == sglang ]]; then
    local found
    found=$(nvidia-smi --list-gpus | wc -l)
    ((found == $3)) || die "$found GPUs instead of $3; is the driver there? nvidia-smi tells"
    echo "$(hostname): $found GPUs"
    return
  fi
  timeout 300 python - "$@" <<'PYTHON' || die "the devices are not as they should be: a run that goes on? tpu_scripts/pod stop"
import sys

import jax

accelerator, hosts, devices = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if accelerator == "tpu":
    jax.distributed.initialize()
seen = jax.default_backend(), jax.process_count(), jax.local_device_count(), jax.device_count()
print(f"backend {seen[0]}, host {jax.process_index()} of {seen[1]}: {seen[2]} of {seen[3]} devices")
sys.exit(seen != (accelerator, hosts, devices, hosts * devices))
PYTHON
}

boot() { cat /proc/sys/kernel/random/boot_id; }

# running: a number from before the machine was started anew means another process
running() { [[ -s $RUN/pid && ! -s $RUN/code && $(<"$RUN/boot") == "$(boot)" ]] && kill -0 "$(<"$RUN/pid")" 2>/dev/null; }

# launch COMMAND WORD...: a session of its own, so that it outlives the connection
launch() {
  ! running || die "a run is going on: tpu_scripts/pod stop first"
  [[ -d $CODE && -d $VENV ]] || die "this host is not set up: tpu_scripts/pod setup"
  mkdir -p "$RUN"
  rm -f "$RUN/pid" "$RUN/code" "$RUN/router"
  boot >"$RUN/boot"
  printf '%q ' "$@" >"$RUN/command"
  setsid nohup bash "$HOME/on_host.sh" attend "$@" </dev/null >>"$RUN/log" 2>&1 &
  for _ in {1..50}; do
    [[ ! -s $RUN/pid ]] || break
    sleep 0.1
  done
  sleep "$PAUSE"
  if ! running && [[ $(cat "$RUN/code" 2>/dev/null) != 0 ]]; then
    tail -n 5 "$RUN/log" >&2
    die "it ended at once, with exit code $(cat "$RUN/code" 2>/dev/null || echo unknown)"
  fi
  echo "$(hostname): launched"
}

# attend COMMAND WORD...: keeps the exit code; hands on SIGTERM, which systemd also sends to all of them when the machine goes down
attend() {
  local child code
  trap 'kill -TERM "$child" 2>/dev/null || true' TERM
  echo "== $(date -u +%FT%TZ) revision $(cat "$CODE/REVISION") =="
  # shellcheck source=/dev/null
  [[ ! -f $HOME/variables ]] || source "$HOME/variables"
  cd "$HOME"
  if [[ $1 == servers ]]; then bash "$HOME/on_host.sh" "$@" & else "$@" & fi
  child=$!
  echo "$child" >"$RUN/pid"
  while :; do # wait ends at a signal, too
    code=0
    wait "$child" || code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  echo "$code" >"$RUN/code"
}

# status: one line
status() {
  local state="not launched" last=""
  if running; then
    state=running
  elif [[ -s $RUN/code ]]; then
    state="ended with $(<"$RUN/code")"
  elif [[ -s $RUN/pid ]]; then
    state="ended with 137" # without a word: killed, or the machine went down
  fi
  [[ ! -s $RUN/log ]] || last=$(tail -n 50 "$RUN/log" | grep -v '^ *$' | tail -n 1)
  echo "$(hostname)  revision $(cut -c1-12 "$CODE/REVISION" 2>/dev/null || echo none)  $state  $last"
}

# logs LINES yes|no
logs() {
  [[ -f $RUN/log ]] || die "no run was launched here"
  if [[ $2 == yes ]]; then exec tail -n "$1" -F "$RUN/log"; else tail -n "$1" "$RUN/log"; fi
}

# stop GRACE
stop() {
  local waited
  if running; then
    [[ ! -s $RUN/router ]] || kill -TERM "$(<"$RUN/router")" 2>/dev/null || true
    kill -TERM "$(<"$RUN/pid")"
    for ((waited = 0; waited < 10 * $1; waited++)); do
      running || break
      sleep 0.1
    done
    if running; then
      kill -KILL "$(<"$RUN/pid")"
      sleep 1 # attend writes the exit code
    fi
  fi
  status
}

# servers COUNT TENSOR FLAG...: SGLang servers on ports 30000, ..., started anew when they end, until SIGTERM
servers() {
  local count=$1 tensor=$2 index first
  local -a children=()
  shift 2
  [[ ! ${SGLANG_API_KEY:-} ]] || api_key_file
  export SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 # for the few tokens beyond the run's context, which no position reaches
  for ((index = 0; index < count; index++)); do
    first=$((index * tensor))
    CUDA_VISIBLE_DEVICES=$(seq -s, "$first" "$((first + tensor - 1))") keep "$((30000 + index))" "$@" &
    children+=($!)
  done
  trap 'kill -TERM "${children[@]}" 2>/dev/null || true' TERM
  while kill -0 "${children[@]}" 2>/dev/null; do wait || true; done
}

# keep PORT FLAG...: one server
keep() {
  local port=$1 child=""
  shift
  trap '[[ ! $child ]] || { kill -TERM "$child" && wait "$child"; } 2>/dev/null; exit 143' TERM
  while :; do
    python -m sglang.launch_server --port "$port" "$@" ${KEY_FILE:+--config "$KEY_FILE"} &
    child=$!
    wait "$child" || echo "the server on port $port ended with $?"
    sleep "$PAUSE"
  done
}

# api_key_file: the key goes to the servers in a file, since everybody on a machine reads command lines
api_key_file() {
  KEY_FILE=$RUN/key.yaml
  (umask 077 && printf 'api-key: "%s"\n' "$SGLANG_API_KEY" >"$KEY_FILE")
}

# router URL...: one address in front of all servers
router() {
  # shellcheck disable=SC2016 # for the inner shell
  setsid nohup bash -c 'source "$HOME/variables"; exec "$@"' - python -m sglang_router.launch_router \
    --host 0.0.0.0 --port 8000 --policy cache_aware --worker-urls "$@" </dev/null >"$RUN/router.log" 2>&1 &
  echo "$!" >"$RUN/router"
  echo "$(hostname): router launched"
}

"$@"
