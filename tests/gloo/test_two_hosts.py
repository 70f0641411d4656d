"""HSDP over two hosts, made of two network namespaces: what crosses the wire is what is said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "two_hosts_run.py"


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts():
    """Return two namespaces with one wire between them: name, interface and address of each."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts need the command `ip` (iproute2), which is not there")
    tag = f"{os.getpid() % 100_000}"
    made = [
        (f"distft-{side}{tag}", f"d{side}{tag}", f"10.77.0.{n}") for n, side in ((1, "a"), (2, "b"))
    ]
    try:
        try:
            for name, _, _ in made:
                ip("netns", "add", name)
            ip("link", "add", made[0][1], "type", "veth", "peer", "name", made[1][1])
            for name, interface, address in made:
                ip("link", "set", interface, "netns", name)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
                ip("-n", name, "link", "set", interface, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield made
    finally:
        for name, _, _ in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_the_wire_carries_the_replica_all_reduce_and_no_more(hosts, tmp_path):
    running = []
    try:
        for name, interface, address in hosts:
            command = [
                "ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run",
                "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
                "--rdzv-id", "two-hosts", "--rdzv-endpoint", f"{hosts[0][2]}:29400",
                # Both namespaces have the machine's name.
                "--rdzv-conf", f"is_host={int(name == hosts[0][0])}",
                "--local-addr", address, str(SCRIPT), str(tmp_path), interface,
            ]  # fmt: skip
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
            with (tmp_path / f"{name}.log").open("w") as log:
                running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        codes = [process.wait(300) for process in running]
    finally:
        for process in running:
            process.terminate()
    logs = "\n".join(file.read_text()[-2000:] for file in tmp_path.glob("*.log"))
    assert codes == [0, 0], logs
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    # Groups of two lie within a host, so replicas are on both.
    assert [rank["replicas"] for rank in ranks] == [[0, 2], [1, 3]] * 2
    for rank in ranks:
        assert rank["counted"] == rank["formula"] > 0
    for first in (0, 2):
        said = sum(rank["counted"] for rank in ranks[first : first + 2])
        assert ranks[first]["busy"] - ranks[first]["idle"] == pytest.approx(said, rel=0.05)
