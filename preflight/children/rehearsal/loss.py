"""How the loss is computed when the plan does not take the model's own way."""


def own_loss(torch, plan, model, recorder):
    """How the loss is computed when the plan does not take the model's own: None, or a function of (inputs, labels)."""
    kind = plan["loss"]
    if kind in ("full_logits_fp32_upcast", "classification"):
        return None

    class InPlace(torch.autograd.Function):
        """A fused kernel: keeps log-sum-exp per row and writes the gradient over the logits."""

        @staticmethod
        def forward(ctx, logits):
            rows = torch.empty(logits.shape[:-1], dtype=torch.float32)
            ctx.save_for_backward(logits, rows)
            return torch.empty((), dtype=torch.float32)

        @staticmethod
        def backward(ctx, grad):
            return ctx.saved_tensors[0].detach()

    class Linear(torch.autograd.Function):
        """Liger's fused linear cross-entropy: logits in pieces, the gradient made in the forward pass."""

        @staticmethod
        def forward(ctx, hidden, weight):
            rows, width = hidden.shape
            vocabulary = weight.shape[0]
            pieces = -(-vocabulary // width)
            size = 1 << max(0, (-(-rows // pieces) - 1)).bit_length()
            grad = torch.zeros_like(hidden)
            grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
            losses = torch.zeros((rows,), dtype=torch.float32)
            for start in range(0, rows, size):
                piece = hidden[start : start + size] @ weight.t()
                part = piece @ weight
                grad[start : start + size] = part
                if grad_weight is not None:
                    grad_weight.addmm_(piece.t(), hidden[start : start + size])
                del piece, part
            del losses
            ctx.grads = (grad, grad_weight)
            return torch.empty((), dtype=torch.float32)

        @staticmethod
        def backward(ctx, grad):
            return ctx.grads

    def base_and_head():
        inner = model
        while hasattr(inner, "base_model") and inner.base_model is not inner and hasattr(inner.base_model, "model"):
            if not hasattr(inner, "peft_config"):
                break
            inner = inner.base_model.model
        head = inner.get_output_embeddings()
        base = getattr(inner, inner.base_model_prefix)
        return base, head

    def loss(inputs, labels):
        if kind in ("fused_linear_ce", "chunked_lm_head_and_ce"):
            base, head = base_and_head()
            hidden = base(**inputs)[0]
            hidden = hidden.reshape(-1, hidden.shape[-1])
            weight = head.weight
            if torch.is_autocast_enabled("cpu"):
                hidden, weight = hidden.to(torch.get_autocast_dtype("cpu")), weight.to(torch.get_autocast_dtype("cpu"))
            elif hidden.dtype != weight.dtype:
                hidden = hidden.to(weight.dtype)
            with torch.autocast("cpu", enabled=False):
                return Linear.apply(hidden, weight), None
        if kind == "fused_ce_on_full_logits":
            # such kernels take the place of cross_entropy inside the model's own forward, after its casts and copies
            functional = torch.nn.functional
            own = functional.cross_entropy
            functional.cross_entropy = lambda logits, *rest, **options: InPlace.apply(logits)
            try:
                out = model(**inputs, labels=labels)
            finally:
                functional.cross_entropy = own
            return out.loss if hasattr(out, "loss") else out[0], out
        out = model(**inputs)
        logits = out.logits if hasattr(out, "logits") else out[0]
        flat = logits.view(-1, logits.shape[-1])
        if kind == "full_logits_chunked_ce":
            total = 0
            for piece, part in zip(flat.split(128), labels.view(-1).split(128)):
                total = total + torch.nn.functional.cross_entropy(piece, part)
            return total, out
        return torch.nn.functional.cross_entropy(flat, labels.view(-1)), out

    return loss
