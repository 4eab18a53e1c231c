#!/usr/bin/env bash
# Slurm on this machine alone, as root: `apt-get install slurm-wlm munge`, then
#   tests/distributed/slurm.sh FOLDER && export SLURM_CONF=FOLDER/slurm.conf && sinfo
# `scontrol shutdown` ends it.
set -euo pipefail
folder=$1 host=$(hostname -s)
mkdir -p "$folder"/{spool,state}
cat >"$folder/slurm.conf" <<END
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc --all)
PartitionName=all Nodes=$host Default=YES
END
if ! pgrep -x munged >/dev/null; then
  install -d -o munge -g munge /run/munge
  runuser -u munge -- munged
fi
export SLURM_CONF=$folder/slurm.conf
slurmctld -c
slurmd
for _ in $(seq 60); do
  sinfo --noheader --states=idle | grep -q "$host" && exit 0
  sleep 0.5
done
sinfo && exit 1
