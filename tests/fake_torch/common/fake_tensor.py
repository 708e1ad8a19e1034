"""The little of torch's interface that the probe uses, on plain lists. Each broken torch starts from a working one."""


class Tensor:
    def __init__(self, values, rows=None):
        self.values, self.rows, self.device = list(values), rows, "cpu"

    def reshape(self, rows, columns):
        return Tensor([self.values[r * columns : (r + 1) * columns] for r in range(rows)], rows)

    def to(self, *place, **options):
        made = Tensor(self.values, self.rows)
        made.device = options.get("device", place[0] if place else self.device)
        return made

    def __matmul__(self, other):
        columns = list(zip(*other.values))
        made = [[float(sum(a * b for a, b in zip(row, column))) for column in columns] for row in self.values]
        result = Tensor(made, self.rows)
        result.device = self.device
        return result

    def tolist(self):
        return self.values

    def numpy(self):
        return self.values


class Version:
    def __init__(self, cuda=None, hip=None):
        self.cuda, self.hip, self.xpu = cuda, hip, None


class Properties:
    def __init__(self, name, major, minor, total):
        self.name, self.major, self.minor, self.total_memory = name, major, minor, total
        self.multi_processor_count = 82


class Device:
    def __init__(self, index):
        self.index = index

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


class Cuda:
    """torch.cuda with one card of the given capability, or none."""

    def __init__(self, capability=None, architectures=(), name="NVIDIA GeForce RTX 3090"):
        self.capability, self.architectures, self.name = capability, list(architectures), name
        self.device = Device

    def is_available(self):
        return self.capability is not None

    def device_count(self):
        return 1 if self.capability else 0

    def init(self):
        if not self.capability:
            raise RuntimeError("No CUDA GPUs are available")

    def get_arch_list(self):
        return self.architectures

    def get_device_properties(self, index):
        return Properties(self.name, *self.capability, total=24 << 30)

    def mem_get_info(self):
        return 20 << 30, 24 << 30

    def is_bf16_supported(self, including_emulation=True):
        return including_emulation or self.capability[0] >= 8


class Backends:
    class mps:
        @staticmethod
        def is_built():
            return False

        @staticmethod
        def is_available():
            return False


def working(namespace, version="2.11.0+cu128", cuda="12.8", hip=None, card=None):
    """Fill a module's namespace with a torch that works."""
    namespace.update(
        __version__=version,
        version=Version(cuda, hip),
        cuda=card or Cuda(),
        backends=Backends,
        float32="float32",
        float16="float16",
        bfloat16="bfloat16",
        zeros=lambda count: Tensor([0.0] * count),
        tensor=lambda values, dtype=None: Tensor(values),
        _C=object(),
    )
