#!/usr/bin/env bash
# Stands for gcloud, kubectl, docker, uv and nvidia-smi: writes its words as a line of JSON to $STUB_RECORD, fails where they hold $STUB_FAIL, and answers.
#
# $STUB_ANSWERS, a file of lines SUBSTRING|ANSWER|CODE: the first that fits is used up. $STUB_HOSTS, a folder: what is sent by ssh and scp
# happens in its folders 0, 1, ..., the home folders of as many hosts; a machine NAME-N is host N.
program=${0##*/}
words="$program $*"
{
  printf '["%s"' "$program"
  for word; do
    word=${word//\\/\\\\}
    word=${word//\"/\\\"}
    printf ', "%s"' "${word//$'\n'/\\n}"
  done
  printf ']\n'
} >>"$STUB_RECORD"

if [[ ${STUB_FAIL:-} && $words == *"$STUB_FAIL"* ]]; then
  echo "${STUB_SAYS:-out of order}" >&2
  exit "${STUB_CODE:-1}"
fi

if [[ -s ${STUB_ANSWERS:-} ]]; then
  mapfile -t lines <"$STUB_ANSWERS"
  for index in "${!lines[@]}"; do
    IFS='|' read -r part answer code <<<"${lines[index]}"
    if [[ $part && $words == *"$part"* ]]; then
      unset "lines[index]"
      printf '%s\n' "${lines[@]}" >"$STUB_ANSWERS"
      if [[ ${code:-0} == 0 ]]; then echo "$answer"; else echo "$answer" >&2; fi
      exit "${code:-0}"
    fi
  done
fi

each_host() { # --worker=N of the words, or all
  local chosen
  chosen=$(sed -nE 's/.*(--worker=| fleet-)([0-9]+).*/\2/p' <<<"$words")
  if [[ $chosen ]]; then echo "$STUB_HOSTS/$chosen"; else printf '%s\n' "$STUB_HOSTS"/*; fi
}

case $words in
  nvidia-smi*) printf 'GPU %s\n' {0..7} ;;
  "uv venv"*)
    mkdir -p "${*: -1}/bin"
    cp "$HOME/trace-jax/run.sh" "${*: -1}/bin/trace-jax"
    cp "$HOME/trace-jax/python.sh" "${*: -1}/bin/python"
    chmod +x "${*: -1}"/bin/*
    ;;
  *" ssh "*"--command="*)
    if [[ ${STUB_HOSTS:-} ]]; then
      for word; do [[ $word != --command=* ]] || command=${word#--command=}; done
      worst=0
      for home in $(each_host); do (cd "$home" && HOME=$home bash -c "$command") || worst=$?; done
      exit "$worst"
    fi
    [[ $words != *"on_host.sh status"* ]] || echo "host  revision 0123456789ab  ended with 0  done"
    ;;
  *" scp "*)
    if [[ ${STUB_HOSTS:-} ]]; then
      for home in $(each_host); do
        for word; do [[ $word != /* ]] || cp -p "$word" "$home"; done
      done
    fi
    ;;
  *"queued-resources describe"*"value("*) echo ACTIVE ;;
  *"tpu-vm describe"*) echo READY ;;
  *"instances describe"*networkIP*) echo 10.0.0.7 ;;
  *"instances describe"*"value("*) echo RUNNING ;;
esac
