"""Laboratory: runs a scenario with real peers, each with its own p2pd, on this machine.

``p2ptrain testnet --scenario FILE`` reads the file that ``p2ptrain simulate`` reads, and performs it: peers come late,
are killed, suspended, leave and return; computers fail, and some peers are adversarial; links are slow and lose
packets; routers drop inbound connections; the network is partitioned. It then computes figures from the artifacts of
all peers and compares them with the scenario's limits.

=================  ==================================================================================
command            the outside process: reads a scenario, writes the report, starts the cell
plan               the scenario as a manifest, and what a stage does not support
scenario           fields of a scenario that only real peers support (pure)
script             peers and events as plain data (pure)
inner_main         the inside process: makes the stage, runs the script, counts leftovers
runner             starts the initial peers, follows the script, ends all processes
conductor          performs the script's acts on peers and bootstraps
stages             loopback and namespaces: where processes run, and what happens to their links
containers         stage of containers
suspension         suspended machines, resumed even if this process dies
breakage           disks, file descriptors, network daemons and clocks that fail
hostile            adversarial peer
resource_monitor   memory and open files over time
exchange_probe     waits until a peer is in an exchange
hosts              small internet of namespaces: links, routers, partitions
line               network link with delay and loss
namespaces         network namespaces without names
cell               processes that always end together with their starter
run_record         what happened, as plain data
artifacts          files that one peer leaves in its home
figures            numbers from the artifacts of all peers (pure)
healing            figures of partitions (pure)
report             figures compared with limits (pure)
container_summary  summary of a testnet in containers
=================  ==================================================================================
"""

from lab.command import run_scenario

__all__ = ["run_scenario"]
