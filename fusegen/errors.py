"""Every error that fusegen raises on purpose."""


class FusegenError(Exception):
    """The base of them all: `except FusegenError` catches whatever fusegen itself has to say."""


class ChainError(FusegenError):
    """A chain that does not parse: a name, an attribute or the text itself is wrong."""


class ArgumentError(FusegenError):
    """A call whose arguments do not fit the chain: their number, shape, dtype or device."""


class OtherAxesError(ArgumentError):
    """A tensor that would have to lie along two sets of axes of one segment."""


class EmptyReductionError(ArgumentError):
    """A call that reduces no elements, and yet has a result."""


class BuildError(FusegenError):
    """A compiler that is missing or failed, or a module that it built and that does not load."""


class CacheError(FusegenError):
    """A cache that cannot be used, or a miss where building is forbidden."""


class UnsupportedError(FusegenError):
    """A request that is understood and, as documented, refused."""
