# shellcheck shell=bash
# What the sbatch scripts share: where the ranks meet, how they are started, who failed.
# Sourced inside a job, from the folder where sbatch was called.

die() {
    printf 'slurm: error: %s\n' "$*" >&2
    exit 2
}

# value_of FLAG WORDS...: the last value of FLAG among WORDS, as `FLAG VALUE` or `FLAG=VALUE`.
value_of() {
    local flag=$1 value=
    shift
    while [ $# -gt 0 ]; do
        case $1 in
        "$flag") value=${2:-} ;;
        "$flag="*) value=${1#*=} ;;
        esac
        shift
    done
    printf '%s' "$value"
}

# Exports MASTER_ADDR and MASTER_PORT. The address is that of the first node in Slurm's list, under
# which Slurm itself reaches it. The port follows from the job's id, so that jobs that share a node
# do not meet, and is below the ephemeral ports.
rendezvous() {
    local head
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
    MASTER_ADDR=$(scontrol --oneliner show node "$head" |
        sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p') || true
    export MASTER_ADDR=${MASTER_ADDR:-$head}
    export MASTER_PORT=${TSP_PORT:-$((12000 + SLURM_JOB_ID % 20000))}
}

# Sets `launch` (srun and its options) and `inside` (what stands before the command in a container).
# $1: a folder outside the one where sbatch was called that the ranks write to.
launcher() {
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    export PYTHONUNBUFFERED=1
    # Every rank sees all GPUs of its node: it takes the one of its LOCAL_RANK and reaches the others.
    # Consecutive ranks, which make a group, are on one node.
    launch=(srun --kill-on-bad-exit=1 --gpu-bind=none --distribution=block --open-mode=append)
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || launch+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
    inside=()
    [ -n "${TSP_CONTAINER:-}" ] || return 0
    local mounts=$PWD:$PWD,$1:$1${TSP_CONTAINER_MOUNTS:+,$TSP_CONTAINER_MOUNTS}
    case ${TSP_CONTAINER_RUNTIME:-pyxis} in
    pyxis)
        launch+=(--container-image="$TSP_CONTAINER" --container-mounts="$mounts")
        launch+=(--container-workdir="$PWD")
        # Ours, not what the image may set.
        launch+=("--container-env=MASTER_ADDR,MASTER_PORT,CUDA_DEVICE_MAX_CONNECTIONS,OMP_NUM_THREADS")
        ;;
    apptainer)
        inside=(apptainer exec --bind "$mounts" --pwd "$PWD")
        if [ -e /dev/kfd ]; then inside+=(--rocm); else inside+=(--nv); fi
        inside+=("$TSP_CONTAINER")
        ;;
    *) die "TSP_CONTAINER_RUNTIME=$TSP_CONTAINER_RUNTIME: it is pyxis or apptainer" ;;
    esac
}

# ranks LOGS [SRUN OPTIONS...] -- COMMAND...: one srun; each task runs COMMAND as a rank of
# torch.distributed, with its output in LOGS/rank<k>.log, and srun's own words in LOGS/srun.log.
ranks() {
    local logs=$1 options=()
    shift
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    # shellcheck disable=SC2016  # each task expands it
    local as_rank='export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
        export WORLD_SIZE=$SLURM_STEP_NUM_TASKS
        echo "slurm: rank $RANK of $WORLD_SIZE on $SLURMD_NODENAME"
        exec "$@"'
    "${launch[@]}" "${options[@]}" --output="$logs/rank%t.log" "${inside[@]}" \
        bash -c "$as_rank" rank "$@" </dev/null 2>>"$logs/srun.log"
}

# blame LOGS: say which rank failed, and show the end of its log. Slurm names the task that ended
# first; where that one only lost its connection, the cause is a rank with an error of its own.
blame() {
    local lost='Connection (closed|reset)|Broken pipe' rank log other tail
    cat "$1/srun.log" >&2
    rank=$(sed -nE '/: Terminated$/d; s/^srun: error: [^ :]+: tasks? ([0-9]+).*/\1/p' "$1/srun.log" |
        sed -n 1p)
    log=$1/rank$rank.log
    [ -f "$log" ] || return 0
    if tail -n 30 "$log" | grep -qE "$lost"; then
        for other in "$1"/rank*.log; do
            tail=$(tail -n 30 "$other" | sed '/^slurmstepd/d')
            if grep -qE '[Ee]rror: ' <<<"$tail" && ! grep -qE "$lost" <<<"$tail"; then
                log=$other
                break
            fi
        done
    fi
    printf '\nslurm: failed: %s. The end of its log, %s:\n\n' \
        "$(sed -nE 's/^slurm: (rank [0-9]+ of .*)/\1/p' "$log" | tail -n 1)" "$log" >&2
    tail -n 20 "$log" >&2
}
