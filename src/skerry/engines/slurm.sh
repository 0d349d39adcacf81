# Runs one member of a run inside its Slurm job: starts it, brings it back by its policy, lets it leave in order when
# Slurm says TERM, and queues the job again until the run is closed. Read by the job's own script, which has said:
#
#   slurm     the folder of scripts, states and wishes      name      the member: syncer, gpu-0
#   restart   failure, always or never                      command   an array: what is started
#   machines  of this member                                run       the run directory
#   environment   a function that sets what the command is to find
#
# and may have its own `before`, called ahead of each start, and `after`, when the command has ended with 0.

set -u
umask 077
member=$slurm/members/$name
leave_file=$slurm/members/$name.leave
job=$SLURM_JOB_ID # of one element of an array that is the number of all: scontrol would take them all
if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
lives=0 code=0 failures=0 back_off_s=2 leaving='' child='' told=''
if [ -r "$member" ]; then read -r _ lives _ < "$member"; fi
case $lives in '' | *[!0-9]*) lives=0 ;; esac
declare -F before > /dev/null || before() { :; }
declare -F after > /dev/null || after() { :; }

say() { printf 'skerry: %s\n' "$*"; }

# What skerry ps reads: the state, how many lives there were, the last exit code, and since when.
note() {
  printf '%s %s %s %s\n' "$1" "$lives" "$code" "$(date +%s)" > "$member.tmp" && mv -f "$member.tmp" "$member"
}

finish() {
  note "$1"
  rm -f "$leave_file"
  exit "$code"
}

# Nobody has ended the run, taken this member away or said that all of it is over.
is_wanted() { [ ! -e "$slurm/closed" ] && [ ! -e "$slurm/down" ] && [ ! -e "$slurm/gone/$name" ]; }

# Slurm is not ending the job by itself. A job whose time is nearly over is SIGNALING, and no answer is none.
is_going_on() {
  case $(timeout 20 scontrol --oneliner show job "$job" 2> /dev/null) in
    *JobState=COMPLETING* | *JobState=CANCELLED* | *JobState=TIMEOUT* | *JobState=DEADLINE*) false ;;
    *) true ;;
  esac
}

# SIGTERM of the job: its time is nearly over, somebody wants it elsewhere, or wants it to go.
leave() {
  [ -z "$leaving" ] || return
  leaving=yes
  say "told to end: $name leaves in order"
  if [ -n "$child" ]; then pass_on; fi
}
trap leave TERM

# Once: a second word would end a learner at once, and Slurm itself tells every process of a job that it ends.
pass_on() {
  [ -z "$told" ] || return
  told=yes
  is_going_on || return
  if [ "$machines" -gt 1 ]; then : > "$leave_file"; else kill -TERM "$child" 2> /dev/null; fi
}

# On each machine of several: torchrun learns there which of them it is, by its own variable for --node-rank. srun
# would end its processes at once if it were told, so they look for a file.
on_each='export PET_NODE_RANK=$SLURM_NODEID
(exec -- "$@") & child=$! told=
while kill -0 "$child" 2> /dev/null; do
  if [ -z "$told" ] && [ -e "$0" ]; then told=yes; kill -TERM "$child"; fi
  sleep 1
done
wait "$child"'

# A trapped signal ends a `wait` before the child has ended.
wait_for_child() {
  while wait "$child"; code=$?; [ "$code" -gt 128 ] && kill -0 "$child" 2> /dev/null; do :; done
  child=''
}

begin() {
  unset -v command # an array is in no environment, and what is called like one would not be either
  environment
  exec -- "$@"
}

run_once() {
  rm -f "$leave_file"
  lives=$((lives + 1))
  note running
  if [ "$machines" -gt 1 ]; then
    (begin srun --ntasks="$machines" --ntasks-per-node=1 --wait=60 bash -c "$on_each" "$leave_file" "${command[@]}") &
  else
    (begin "${command[@]}") &
  fi
  child=$!
  if [ -n "$leaving" ]; then pass_on; fi
  wait_for_child
}

# Slurm lets a job that was queued again wait for two minutes.
queue_again() {
  say "$name is queued again: $1"
  note waiting
  if timeout 60 scontrol requeue "$job"; then exit 0; fi
  say "Slurm did not queue it again"
  finish failed
}

pause() {
  note restarting
  say "$name ended with $code: it is started again in $back_off_s s"
  sleep "$back_off_s" &
  child=$!
  local last=$code
  wait_for_child
  code=$last
  back_off_s=$((back_off_s * 2 > 60 ? 60 : back_off_s * 2))
}

is_wanted || { say "$name is not wanted any more"; finish ended; }
while [ -z "$leaving" ]; do
  before
  if [ -n "$leaving" ]; then break; fi
  began=$SECONDS
  run_once
  if [ -n "$leaving" ]; then break; fi
  if [ "$code" -eq 0 ]; then
    after
    if [ "$restart" != always ] || ! is_wanted; then finish ended; fi
  elif [ "$restart" = never ] || ! is_wanted; then
    finish failed
  fi
  if [ $((SECONDS - began)) -ge 60 ]; then failures=0 back_off_s=2; fi
  failures=$((failures + 1))
  if [ "$failures" -ge 5 ]; then queue_again "it failed $failures times here, and may do better on another machine"; fi
  pause
  if [ -z "$leaving" ] && ! is_wanted; then finish ended; fi
done
if is_wanted && [ "$restart" != never ] && is_going_on; then queue_again "its time here is over, and the run is not"; fi
code=0
finish ended
