#!/usr/bin/env bash
# Trains on slices of TPUs in a GKE cluster that xpk has made (it writes a JobSet like jobset.yaml):
#
#   CLUSTER=mine WORKLOAD=a IMAGE=REGISTRY/m6jax TPU_TYPE=v5litepod-256 SLICES=2 launch/xpk.sh \
#     --gin_file=configs/quickstart.gin --gin.MODEL_DIR="'gs://BUCKET/runs/a'"
#
# What stands after the script's name goes to m6jax, which is installed in IMAGE. A workload that is
# lost, or that ended with code 75 after it had saved its state, is started again and goes on.
set -euo pipefail

exec xpk workload create \
  --cluster="${CLUSTER:?name of the cluster}" \
  --workload="${WORKLOAD:?name of the run}" \
  --docker-image="${IMAGE:?image in which m6jax is installed}" \
  --tpu-type="${TPU_TYPE:?such as v5litepod-256}" \
  --num-slices="${SLICES:-1}" \
  --max-restarts="${RESTARTS:-100}" \
  --termination-grace-period-seconds=300 \
  --command="python -u -m m6jax.main ${*@Q}"
