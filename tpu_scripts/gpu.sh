# shellcheck shell=bash
# GPU machines of Compute Engine: one with all its GPUs in one process, or several that serve rollouts, called NAME-0, NAME-1, ...

ROLES="roles/compute.instanceAdmin.v1 and roles/iam.serviceAccountUser"

# place [WORKER]: where gcloud looks, all machines and the chosen ones
place() {
  local worker=${1:-${VALUE[worker]}}
  need zone
  local index
  AT=("--zone=${VALUE[zone]}" ${VALUE[project]:+"--project=${VALUE[project]}"} --quiet)
  MACHINES=("${VALUE[name]}")
  if ((${VALUE[hosts]} > 1)); then
    MACHINES=()
    for ((index = 0; index < ${VALUE[hosts]}; index++)); do MACHINES+=("${VALUE[name]}-$index"); done
  fi
  CHOSEN=("${MACHINES[@]}")
  if [[ $worker ]]; then
    [[ $worker =~ ^[0-9]+$ && ${MACHINES[worker]+x} ]] || refuse "--worker=$worker: there are ${VALUE[hosts]} hosts, counted from 0"
    CHOSEN=("${MACHINES[worker]}")
  fi
}

pod_create() {
  place
  need machine_type
  local -a tier=()
  case ${VALUE[provisioning]} in
    spot) tier=(--provisioning-model=SPOT --instance-termination-action=STOP) ;;
    reserved)
      need reservation
      tier=(--reservation-affinity=specific "--reservation=${VALUE[reservation]}")
      ;;
  esac
  run gcloud compute instances create "${MACHINES[@]}" "--machine-type=${VALUE[machine_type]}" \
    "--image-family=${VALUE[image_family]}" "--image-project=${VALUE[image_project]}" "--boot-disk-size=${VALUE[disk_gb]}GB" \
    --maintenance-policy=TERMINATE --scopes=cloud-platform "${tier[@]}" \
    ${VALUE[service_account]:+"--service-account=${VALUE[service_account]}"} \
    ${VALUE[network]:+"--network=${VALUE[network]}"} ${VALUE[subnetwork]:+"--subnetwork=${VALUE[subnetwork]}"} "${AT[@]}"
}

# pod_state: that of the machine that is farthest from ready
pod_state() {
  place
  local machine said state=ready
  for machine in "${MACHINES[@]}"; do
    said=$(ask RUNNING gcloud compute instances describe "$machine" '--format=value(status)' "${AT[@]}") || return
    case $said in
      RUNNING) ;;
      missing) state=missing && break ;;
      TERMINATED | SUSPENDED) state=gone ;;
      *) [[ $state == gone ]] || state=waiting ;; # PROVISIONING, STAGING, STOPPING, REPAIRING
    esac
  done
  echo "$state"
}

pod_show() {
  place
  local machine
  for machine in "${MACHINES[@]}"; do
    run gcloud compute instances describe "$machine" '--format=table[box](name,status,machineType.basename(),lastStartTimestamp)' "${AT[@]}"
  done
}

# pod_revive: a preempted machine was stopped, and keeps its disk
pod_revive() {
  place
  run gcloud compute instances start "${MACHINES[@]}" "${AT[@]}"
}

pod_delete() {
  place
  run gcloud compute instances delete "${MACHINES[@]}" "${AT[@]}"
}

on_hosts() {
  place "${2:-}"
  local machine
  local -a more=()
  read -ra more <<<"${VALUE[ssh_flags]}"
  for machine in "${CHOSEN[@]}"; do
    run gcloud compute ssh "$machine" "${more[@]}" "--command=$1" "${AT[@]}"
  done
}

to_hosts() {
  place
  local machine
  local -a more=()
  read -ra more <<<"${VALUE[ssh_flags]}"
  for machine in "${CHOSEN[@]}"; do
    run gcloud compute scp "$@" "$machine:" "${more[@]}" "${AT[@]}"
  done
}
