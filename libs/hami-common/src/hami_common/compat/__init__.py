# SPDX-License-Identifier: Apache-2.0
"""Annotation formats of HAMi and of Volcano: read, written, and adopted as allocations of ours.

Decides what an annotation of theirs means in the terms of ``model``; when to read or write one is
the services' decision. No I/O.
"""
