"""Slurm on this machine: a controller and two nodes of two GPUs each, which are device files of no GPU."""

import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")
NODES = ("node1", "node2")
PATIENCE_S = 60  # for daemons to answer

CONFIGURATION = """\
ClusterName=local
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=300
NodeName=node[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports} CPUs=4 RealMemory=1000 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
GPUS = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"


def path_of(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def missing() -> list[str]:
    return [program for program in PROGRAMS if path_of(program) is None]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Cluster:
    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def ask(self, program: str, *arguments: str, **more: str) -> str:
        """What a client of Slurm prints. more: environment variables."""
        done = subprocess.run(
            [path_of(program), *arguments], env=self.environment | more, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, folder: Path, *arguments: str, **more: str) -> str:
        """The job's number. Its output goes to `job-NUMBER.log` in the folder."""
        log = f"--output={folder}/job-%j.log"
        return self.ask("sbatch", "--parsable", f"--chdir={folder}", log, *arguments, **more).strip()

    def state(self, job: str) -> str:
        return self.ask("scontrol", "show", "job", job, "-o").partition("JobState=")[2].split()[0]

    def wait(self, job: str, seconds: float) -> str:
        """The state in which it ended."""
        give_up_at = time.monotonic() + seconds
        while (state := self.state(job)) in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            assert time.monotonic() < give_up_at, f"job {job} is {state} after {seconds} s"
            time.sleep(0.5)
        return state


@contextmanager
def cluster(home: Path):
    """Daemons that live in `home` and end with the block."""
    key = home / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    controller, *ports = _free_ports(1 + len(NODES))
    user = subprocess.check_output(["id", "-un"], text=True).strip()
    text = CONFIGURATION.format(home=home, user=user, controller=controller, ports=",".join(map(str, ports)))
    for name, content in {"slurm.conf": text, "gres.conf": GPUS, "cgroup.conf": ""}.items():
        (home / name).write_text(content)
    for folder in ("state", *NODES):
        (home / folder).mkdir()
    found = Cluster(os.environ | {"SLURM_CONF": str(home / "slurm.conf")})
    files = {name: f"--{name}-file={home}/munged.{name}" for name in ("pid", "log", "seed")}
    commands = [
        ("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={home}/munge.socket", *files.values()),
        ("slurmctld", "-D"),
        *(("slurmd", "-D", "-N", node) for node in NODES),
    ]
    daemons = []
    try:
        for program, *options in commands:
            log = (home / f"{program}{len(daemons)}.out").open("w")
            command = [path_of(program), *options]
            daemons.append(subprocess.Popen(command, env=found.environment, stdout=log, stderr=log))
            _wait_until(lambda: (home / "munge.socket").exists())
        _wait_until(lambda: found.ask("sinfo", "--noheader", "--format=%T %D").split() == ["idle", "2"])
        yield found
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(60)


def _wait_until(condition) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            if condition():
                return
        except AssertionError:  # a daemon does not answer yet
            pass
        assert time.monotonic() < give_up_at, "Slurm's daemons did not come up"
        time.sleep(0.2)
