"""Something that torch imports is not installed."""
import a_module_that_is_not_there  # noqa
