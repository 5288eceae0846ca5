"""What plugin and controller share of HTTP; needed by no training image."""

from tiphys.web.bodies import BodyTooLargeError, read_body
from tiphys.web.server import AppServer

__all__ = ["AppServer", "BodyTooLargeError", "read_body"]
