"""What a simulation assumes about GPUs, hosts and the network; `--assume NAME=VALUE` changes it.

The first rows are NVIDIA's figures for an H100 SXM node. Efficiencies and latencies are round
numbers for well-tuned software, chosen before the comparison with published throughput
(docs/clusters.md) and not fitted to it.
"""

from dataclasses import dataclass, field, fields, replace

from megastep.errors import ConfigError


def _assumed(value: float, meaning: str, is_fraction: bool = False):
    return field(default=value, metadata={"meaning": meaning, "is_fraction": is_fraction})


@dataclass(frozen=True)
class Hardware:
    # Data sheet of the H100 SXM and of a DGX H100.
    peak_flops: float = _assumed(989e12, "dense bf16 FLOP/s of a GPU")
    memory_bytes_s: float = _assumed(3.35e12, "memory bandwidth of a GPU")
    nvlink_bytes_s: float = _assumed(450e9, "NVLink of a GPU, per direction")
    network_bytes_s: float = _assumed(50e9, "network of a GPU, per direction: 400 Gb/s")
    pcie_bytes_s: float = _assumed(50e9, "GPU ↔ CPU memory, per direction: PCIe 5 x16")
    host_bytes_s: float = _assumed(50e9, "CPU memory bandwidth per GPU, for Adam on the CPU")
    # Achieved fractions.
    memory_efficiency: float = _assumed(0.8, "of the memory bandwidth, in decoding", True)
    link_efficiency: float = _assumed(0.7, "of NVLink and network, in collectives", True)
    prefill_efficiency: float = _assumed(0.5, "of the peak, in prefill", True)
    dense_efficiency: float = _assumed(0.5, "of the peak, in dense layers of an update", True)
    expert_efficiency: float = _assumed(0.3, "of the peak, in experts of an update", True)
    # Latencies and fixed costs, in seconds.
    layer_s: float = _assumed(40e-6, "kernels of a layer in decoding, at least")
    collective_s: float = _assumed(15e-6, "latency of a collective inside a node")
    network_collective_s: float = _assumed(60e-6, "latency of a collective across nodes")
    iteration_s: float = _assumed(2e-3, "scheduling and sampling per iteration of an engine")
    call_s: float = _assumed(5e-3, "agent, router and transport per model call")
    sleep_s: float = _assumed(2.0, "an engine's sleep, or one of its two wakes, colocated")
    pause_s: float = _assumed(0.5, "pause and resume of all engines")
    tensor_s: float = _assumed(2e-4, "load of one tensor by an engine, in a weight sync")
    gpus_per_node: float = _assumed(8, "GPUs that NVLink connects")

    def changed(self, assignments: list[str]) -> "Hardware":
        """With other values, each NAME=VALUE."""
        known = {known.name: known for known in fields(self)}
        values: dict[str, float] = {}
        problems = []
        for text in assignments:
            name, _, value = text.partition("=")
            if name not in known:
                names = ", ".join(known)
                problems.append(f"--assume {text[:80]}: NAME=VALUE is needed, NAME one of {names}")
                continue
            most = 1.0 if known[name].metadata["is_fraction"] else 1e18
            number = _number(value)
            if number is None or not 0 < number <= most:
                problems.append(
                    f"--assume {text[:80]}: a number above 0 is needed, at most {most:g}"
                )
                continue
            values[name] = number
        if problems:
            raise ConfigError(problems)
        return replace(self, **values)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def assumptions_text(hardware: Hardware) -> str:
    """One line per assumption."""
    found = [(known.name, getattr(hardware, known.name), known) for known in fields(hardware)]
    width = max(len(name) for name, _, _ in found)
    return "\n".join(
        f"{name:<{width}}  {value:<9.4g}  {known.metadata['meaning']}"
        for name, value, known in found
    )
