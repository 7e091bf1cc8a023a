//! Jobs of a disk in use: clients write while backups and mirrors run, are paused, limited, cancelled
//! and completed, and while connections are cut, servers end, disks fail and lose power.
//!
//! A backup is the disk of its moment, byte for byte; a mirror is the disk, and clients that move to
//! it notice nothing; bitmaps show every difference, or say that they cannot; every job ends.
//!
//! - `world`: the served disk, the target, the clients, and what happens to them. `bitmaps`: what
//!   bitmaps must show. `drive`: controls a job. `backup`, `mirror`: one job. `run`: one after
//!   another.

mod backup;
mod bitmaps;
mod drive;
mod mirror;
mod run;
mod world;

pub(crate) use run::run;
