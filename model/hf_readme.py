"""What README.md says in an export: how to open it, and how a head that `transformers` does not have is joined to its backbone."""

LANGUAGE_MODEL_README = """\
# A language model with a softmax head

```python
from transformers import AutoModel{auto}

model = AutoModel{auto}.from_pretrained(folder)  # folder: where this file lies
logits = model(tokens).logits  # tokens (B, T)
```
"""

HEAD_README = """\
# A backbone for `transformers`, and its {head} head

`model.safetensors` is the backbone; `AutoModel` loads it. The {head} head is not a layer that `transformers` has: it lies in
`head.safetensors`, described by `head.json`, and needs the `heads` package of the toolkit that trained it on the path.

```python
import json

import torch
from safetensors.torch import load_file
from transformers import AutoModel

from heads import build_head

backbone = AutoModel.from_pretrained(folder).eval()  # folder: where this file lies
about = json.load(open(f"{{folder}}/head.json", encoding="utf-8"))
tensors = load_file(f"{{folder}}/head.safetensors")
head = build_head(about["name"], about["n_embd"], about["vocab_size"], about["padded_vocab_size"], **about["options"]).eval()
head.load_state_dict({{name.removeprefix("head."): value for name, value in tensors.items() if name.startswith("head.")}})

hidden = backbone(tokens).last_hidden_state  # tokens (B, T) -> (B, T, D)
{transform}log_probs = head.log_probs(hidden)  # (B, T, rows): natural logarithms of probabilities, -inf at rows that are no word
```
"""

TRANSFORM_LINES = """\
hidden = torch.nn.functional.linear(hidden, tensors["transform.dense.weight"], tensors.get("transform.dense.bias"))
hidden = torch.nn.functional.gelu(hidden)
scale, shift = tensors["transform.norm.weight"], tensors.get("transform.norm.bias")
hidden = torch.nn.functional.layer_norm(hidden, scale.shape, scale, shift, 1e-12)
"""
