"""The model run over a workload in virtual time."""

from srtm.sim.simulate import SimulatedBroker, Simulation, Topic, assess, simulate

__all__ = ["SimulatedBroker", "Simulation", "Topic", "assess", "simulate"]
