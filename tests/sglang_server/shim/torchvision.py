"""`torchvision`, which the configurations of vision models import; no text model calls it."""

import stubs

__version__ = "0.0.0"

stubs.fill(__name__)
