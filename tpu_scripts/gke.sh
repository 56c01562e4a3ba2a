# shellcheck shell=bash
# The commands on GKE: nodes are a node pool with the slice's topology, hosts are the pods of a JobSet, the code is an image, whose tag is
# the revision. The JobSet controller relaunches by itself, so that there is nothing to wait for here. kubectl talks to the cluster that
# create connected it with.

ROLES="roles/container.admin (nodes), roles/container.developer (the rest)"
OF="jobset.sigs.k8s.io/jobset-name=${VALUE[name]}" # label of all pods

cluster_at() {
  need cluster
  VALUE[location]=${VALUE[location]:-${VALUE[zone]}}
  [[ ${VALUE[location]} ]] || refuse "--location is missing: ${HELP[location]}"
  AT=("--location=${VALUE[location]}" ${VALUE[project]:+"--project=${VALUE[project]}"} --quiet)
}

command_create() {
  cluster_at
  need machine_type topology zone
  local -a tier=()
  case ${VALUE[provisioning]} in
    spot) tier=(--spot) ;;
    reserved)
      need reservation
      tier=(--reservation-affinity=specific "--reservation=${VALUE[reservation]}")
      ;;
  esac
  run gcloud container clusters get-credentials "${VALUE[cluster]}" "${AT[@]}"
  run gcloud container node-pools create "${VALUE[name]}" "--cluster=${VALUE[cluster]}" "--machine-type=${VALUE[machine_type]}" \
    "--tpu-topology=${VALUE[topology]#*:}" "--num-nodes=${VALUE[hosts]}" "--node-locations=${VALUE[zone]}" "${tier[@]}" \
    --scopes=cloud-platform "${AT[@]}"
  note "next: tpu_scripts/pod setup, which installs the JobSet controller, and push"
}

# the code is in the image; what a cluster needs besides is the controller, once
command_setup() {
  run kubectl apply --server-side \
    "--filename=https://github.com/kubernetes-sigs/jobset/releases/download/${VALUE[jobset]}/manifests.yaml"
  command_push
}

chosen_image() {
  need image
  chosen_revision
  IMAGE=${VALUE[image]}:${REVISION:0:12}
}

command_push() {
  chosen_image
  local context=$PRIVATE/image # what git has of the revision, and nothing else
  run rm -rf "$context"
  run mkdir -p -m 700 "$context"
  run git -C "$ROOT" archive "--output=$PRIVATE/trace-jax.tar" "$REVISION"
  run tar -xf "$PRIVATE/trace-jax.tar" -C "$context"
  run "${VALUE[docker]}" build --build-arg "EXTRAS=${VALUE[install]}${VALUE[extras]:+,${VALUE[extras]}}" \
    --build-arg "PYTHON=${VALUE[python]}" --tag "$IMAGE" "$context"
  run "${VALUE[docker]}" push "$IMAGE"
}

# hand_over: a secret of the JobSet, from files, so that no value stands in a command line
hand_over() {
  local name folder=$PRIVATE/variables line
  run kubectl delete secret "${VALUE[name]}-env" --ignore-not-found
  [[ ${VALUE[env]} ]] || return 0
  names_of_variables
  run rm -rf "$folder"
  run mkdir -p -m 700 "$folder"
  for name in "${NAMES[@]}"; do
    line="(umask 077; printf %s \"\$$name\" >$(quoted "$folder/$name"))"
    if [[ ${VALUE[dry_run]} ]]; then echo "$line"; else eval "$line"; fi
  done
  run kubectl create secret generic "${VALUE[name]}-env" "--from-file=$folder"
  run rm -r "$folder"
}

# json WORD...: a list, which is YAML too
json() {
  local word line=""
  for word; do
    word=${word//\\/\\\\}
    word=${word//\"/\\\"}
    line+=", \"$word\""
  done
  echo "[${line#, }]"
}

# manifest: jobset.yaml with its {{names}} filled in
manifest() {
  local text key
  local -A fill=([image]=$IMAGE [revision]=$REVISION [topology]=${VALUE[topology]#*:} [service_account]=${VALUE[service_account]:-default})
  for key in name hosts tries grace accelerator devices; do fill[$key]=${VALUE[$key]}; done
  text=$(<"$SCRIPTS/jobset.yaml")
  for key in "${!fill[@]}"; do text=${text//"{{$key}}"/"${fill[$key]}"}; done
  echo "${text/"{{arguments}}"/"$(json "${ARGUMENTS[@]}" --coordinator=auto)"}" # last: they may hold such names themselves
}

command_launch() {
  need accelerator topology devices
  chosen_image
  hand_over
  local file=$PRIVATE/jobset.yaml
  run mkdir -p -m 700 "$PRIVATE"
  if [[ ${VALUE[dry_run]} ]]; then
    printf 'cat >%s <<"EOF"\n%s\nEOF\n' "$(quoted "$file")" "$(manifest)"
  else
    manifest >"$file"
  fi
  run kubectl apply "--filename=$file"
}

command_logs() {
  run kubectl logs "--selector=$OF${VALUE[worker]:+,batch.kubernetes.io/job-completion-index=${VALUE[worker]}}" \
    "--tail=${VALUE[lines]}" --prefix "--max-log-requests=${VALUE[hosts]}" ${VALUE[follow]:+--follow}
}

command_status() {
  local exit='.status.containerStatuses[0].state.terminated.exitCode'
  run kubectl get jobset "${VALUE[name]}" \
    '--output=custom-columns=JOBSET:.metadata.name,RESTARTS:.status.restarts,ENDED:.status.terminalState'
  run kubectl get pods "--selector=$OF" \
    "--output=custom-columns=POD:.metadata.name,PHASE:.status.phase,EXIT:$exit,IMAGE:.spec.containers[0].image"
  VALUE[lines]=1
  command_logs
}

# SIGTERM to all pods, which save; a JobSet that is not there relaunches nothing
command_stop() {
  run kubectl delete jobset "${VALUE[name]}" --ignore-not-found --cascade=foreground
}

command_resume() {
  note "the JobSet controller relaunches by itself, ${VALUE[tries]} times; this begins anew with as many"
  command_stop
  command_launch
}

command_delete() {
  cluster_at
  need cluster
  command_stop
  run kubectl delete secret "${VALUE[name]}-env" --ignore-not-found
  run gcloud container node-pools delete "${VALUE[name]}" "--cluster=${VALUE[cluster]}" "${AT[@]}"
}

command_serve_rollouts() { refuse "servers run on GPU machines: --slice=rollouts-h100x8"; }
