"""The laboratory: a scenario acted out by real peers, each with its own p2pd, on this machine.

``p2ptrain testnet --scenario FILE`` takes what ``p2ptrain simulate`` takes, and makes it happen: peers come late, are
killed, sleep, leave and return; computers break, and some peers lie; lines are slow, delay and lose packets; routers
let nothing in; the network falls apart and heals. Then it reads what everybody left, and holds the figures against the
scenario's limits.

There are two stages. ``local`` puts everybody on the loopback, for the timeline alone. ``namespaces`` gives each a host
of its own, in network namespaces that lead nowhere else; it needs root, and runs in a cell that leaves nothing behind.

==========  ====================================================================================
command     the outside: scenario in, report and exit status out; starts the cell
plan        the scenario as a manifest, and what cannot be acted out, refused by name
scenario    the fields of a scenario that only real peers support (pure)
script      who exists and what happens when, as plain data (pure)
play        the inside: stage, conduct, count what is left
conduct     start, do what the script says, end everybody
window      where all of it can be watched meanwhile
stages      loopback and namespaces: where processes run, and what happens to their lines
freezing    machines that sleep, and wake also when we die
breakage    disks, file descriptors and network daemons that fail
clock       clocks that are wrong
hostile     a real peer that lies
pulse       memory and open files over time
hosts       a small internet of namespaces: lines, routers, partitions
line        a line's delay and loss: a process between two TUN devices
namespaces  network namespaces without names
cell        processes that end together with their starter, without exception
course      how it all went, as plain data
left        what one peer left in its home
broken      exchanges that somebody's death or sleep broke off (pure)
newcomers   how soon they are in step (pure)
healing     what a partition did to exchanges, and how soon that was over (pure)
noticing    whether a lie reached anybody (pure)
figures     numbers from what everybody left (pure)
report      figures held against limits (pure)
==========  ====================================================================================
"""

from lab.command import act_out

__all__ = ["act_out"]
