"""The modules whose lora_B is still zero, as peft initializes it, and the smallest lora_B that is not."""

from pathlib import Path

from safetensors.torch import load_file

tensors = load_file(Path(__file__).parent / "adapter" / "adapter_model.safetensors")
sizes = {name.split("model.model.")[1].removesuffix(".lora_B.weight"): tensor.abs().max().item()
         for name, tensor in tensors.items() if "lora_B" in name}  # fmt: skip
print(len(sizes), "modules; zero:", sorted(name for name, size in sizes.items() if size == 0))
print("smallest of the others:", min((size, name) for name, size in sizes.items() if size))
