"""`megastep plan --simulate`: the training loop in simulated time, for clusters that are not here.

real        Loop, GroupStream, Router, StalenessTracker, filters, mini-batches, packing by
            lengths, the order of pause, sleep, weight sync and wake in Cluster
simulated   the clock, engines, ranks, episodes

clock       an event loop whose time jumps to the next timer
hardware    what is assumed about GPUs and the network
roofline    seconds of prefill, decode, update and weight sync from these
measured    the same from the metrics of a run
episodes    turns and lengths: from distributions or a rollout file
engine      a vLLM engine with continuous batching
cluster     engines and ranks behind the interface of megastep.cluster
simulation  the loop and its result
table       the result as text
"""
