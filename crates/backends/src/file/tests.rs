//! The file backend on tmpfs and on the disk's file system, with both engines.
