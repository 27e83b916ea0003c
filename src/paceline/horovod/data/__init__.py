"""Horovod's base classes of data loaders: `horovod.data`."""

from paceline.horovod.data.async_loader import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
