"""The config of a run: `run` puts the `sections` together, `fields` says how one field is declared, read and checked."""

from trace_jax.config.run import Config, changed_fields, config_names, data_folder, load_config, override
from trace_jax.config.sections import (
    ROOT,
    AgentsSection,
    BaselineSection,
    BenchmarkSection,
    DiagnosisSection,
    EvaluationSection,
    GateSection,
    MeshSection,
    ModelSection,
    ReportSection,
    RolloutSection,
    ServersSection,
    SynthesisSection,
    TargetSection,
    TrainSection,
)

__all__ = [
    "ROOT",
    "AgentsSection",
    "BaselineSection",
    "BenchmarkSection",
    "Config",
    "DiagnosisSection",
    "EvaluationSection",
    "GateSection",
    "MeshSection",
    "ModelSection",
    "ReportSection",
    "RolloutSection",
    "ServersSection",
    "SynthesisSection",
    "TargetSection",
    "TrainSection",
    "changed_fields",
    "config_names",
    "data_folder",
    "load_config",
    "override",
]
