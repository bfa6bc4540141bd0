"""Which family reads which file: the one table to extend for a new architecture (torch-free side).

A new family is one file here that plans its tensors, and one row in each table that applies.
"""

from collections.abc import Callable
from pathlib import Path

from shared.engine.weights import llama, mistral, qwen2, qwen3
from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.gguf_file import GgufFile
from shared.engine.weights.hf_dir import HfDir
from shared.engine.weights.plan import ModelPlan

GGUF_FAMILIES: dict[str, Callable[[GgufFile], ModelPlan]] = {
    "llama": llama.plan_gguf,
    "qwen2": qwen2.plan_gguf,
    "qwen3": qwen3.plan_gguf,
}
HF_FAMILIES: dict[str, Callable[[HfDir], ModelPlan]] = {
    "LlamaForCausalLM": llama.plan_hf,
    "MistralForCausalLM": mistral.plan_hf,
    "Qwen2ForCausalLM": qwen2.plan_hf,
    "Qwen3ForCausalLM": qwen3.plan_hf,
}


def plan_source(source: Path) -> ModelPlan:
    """The plan for a GGUF file or a Hugging Face directory. InvalidModel where no family can make one."""
    if source.is_dir():
        directory = HfDir(source)
        named = directory.config.get("architectures") or []
        for architecture in named:
            if architecture in HF_FAMILIES:
                return HF_FAMILIES[architecture](directory)
        raise _unknown(source, ", ".join(map(str, named)), HF_FAMILIES)
    file = GgufFile(source)
    architecture = file.fields.get("general.architecture", "")
    if architecture not in GGUF_FAMILIES:
        raise _unknown(source, str(architecture), GGUF_FAMILIES)
    return GGUF_FAMILIES[architecture](file)


def _unknown(source: Path, architecture: str, known: dict[str, Callable[..., ModelPlan]]) -> InvalidModel:
    named = repr(architecture) if architecture else "of no name"
    return InvalidModel(f"{source}: the architecture {named} is not supported; supported: {', '.join(known)}")
