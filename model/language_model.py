"""A backbone and a vocabulary head joined into the one module that is trained, wrapped and saved."""

from torch import Tensor, nn


class LanguageModel(nn.Module):
    """Tokens in, summed loss out: the loss is computed inside the module that DDP and compile wrap.

    `backbone` maps tokens (B, T) to hidden states; `head` owns the prototypes `weight` (rows, n_embd).
    Raises ValueError if they are to be tied and their shapes differ.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, tie_weights: bool = True):
        super().__init__()
        self.backbone = backbone
        self.head = head
        if tie_weights:
            embedding = backbone.token_embedding.weight
            if head.weight.shape != embedding.shape:
                raise ValueError(f"cannot tie prototypes of shape {tuple(head.weight.shape)} with embeddings of shape {tuple(embedding.shape)}")
            self.head.weight = embedding

    def forward(
        self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None, label_smoothing: float = 0.0
    ) -> tuple[Tensor, int]:
        """Summed loss in nats over `targets`, and how many targets it sums.

        `tokens` (B, T). Causal: `targets` (B, T), `positions` None. Masked LM: `targets` (N,) are the originals at the
        flat `positions` (N,) into B * T, and only those positions reach the head.
        """
        hidden = self.backbone(tokens, positions)  # (B, T, D) or (N, D)
        return self.head(hidden, targets, reduction="sum", label_smoothing=label_smoothing), targets.numel()
