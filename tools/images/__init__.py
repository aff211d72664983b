# SPDX-License-Identifier: Apache-2.0
"""Builds the images of deploy/Containerfile as OCI archives: ``python -m tools.images``."""

from tools.images.builder import BuildFailed, Image, Images, build

__all__ = ["BuildFailed", "Image", "Images", "build"]
