# shellcheck shell=bash
# A TPU slice: one queued resource with one node of the same name, whose hosts are its workers.

ROLES="roles/tpu.admin and roles/iam.serviceAccountUser"

# place: where gcloud looks
place() {
  need zone
  AT=("--zone=${VALUE[zone]}" ${VALUE[project]:+"--project=${VALUE[project]}"} --quiet)
}

pod_create() {
  place
  need accelerator_type runtime_version
  local -a tier=()
  case ${VALUE[provisioning]} in
    spot) tier=(--spot) ;;
    reserved) tier=(--reserved) ;;
  esac
  run gcloud compute tpus queued-resources create "${VALUE[name]}" "--node-id=${VALUE[name]}" \
    "--accelerator-type=${VALUE[accelerator_type]}" "--runtime-version=${VALUE[runtime_version]}" "${tier[@]}" \
    ${VALUE[service_account]:+"--service-account=${VALUE[service_account]}"} \
    ${VALUE[network]:+"--network=${VALUE[network]}"} ${VALUE[subnetwork]:+"--subnetwork=${VALUE[subnetwork]}"} "${AT[@]}"
}

# pod_state: missing, waiting, ready, or gone (it must be made anew)
pod_state() {
  place
  local said
  said=$(ask ACTIVE gcloud compute tpus queued-resources describe "${VALUE[name]}" '--format=value(state.state)' "${AT[@]}") || return
  case $said in
    ACTIVE)
      said=$(ask READY gcloud compute tpus tpu-vm describe "${VALUE[name]}" '--format=value(state)' "${AT[@]}") || return
      case $said in
        READY) echo ready ;;
        CREATING | STARTING | RESTARTING | REPAIRING) echo waiting ;;
        *) echo gone ;; # PREEMPTED, TERMINATED, STOPPED, missing
      esac
      ;;
    SUSPENDED | FAILED) echo gone ;;
    missing) echo missing ;;
    *) echo waiting ;; # WAITING_FOR_RESOURCES, PROVISIONING, CREATING, ACCEPTED, SUSPENDING, DELETING
  esac
}

# pod_show: what a person wants to know of the machines
pod_show() {
  place
  run gcloud compute tpus queued-resources describe "${VALUE[name]}" \
    '--format=table[box](name.basename(),state.state,tpu.nodeSpec[0].node.acceleratorType,createTime)' "${AT[@]}"
}

# pod_revive: from gone to waiting
pod_revive() {
  pod_delete
  pod_create
}

pod_delete() {
  place
  run gcloud compute tpus queued-resources delete "${VALUE[name]}" --force "${AT[@]}"
}

# on_hosts COMMAND [WORKER]: in the shell of all hosts at once, or of one
on_hosts() {
  place
  local -a more=()
  read -ra more <<<"${VALUE[ssh_flags]}"
  run gcloud compute tpus tpu-vm ssh "${VALUE[name]}" "--worker=${2:-${VALUE[worker]:-all}}" "${more[@]}" "--command=$1" "${AT[@]}"
}

# to_hosts FILE...: to the home folder of all hosts
to_hosts() {
  place
  local -a more=()
  read -ra more <<<"${VALUE[ssh_flags]}"
  run gcloud compute tpus tpu-vm scp "$@" "${VALUE[name]}:" "--worker=${VALUE[worker]:-all}" "${more[@]}" "${AT[@]}"
}
