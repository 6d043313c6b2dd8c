"""The model run over a workload in virtual time."""

from srtm.sim.simulate import SimulatedBroker, SimulatedTopic, Simulation, assess, simulate

__all__ = ["SimulatedBroker", "SimulatedTopic", "Simulation", "assess", "simulate"]
