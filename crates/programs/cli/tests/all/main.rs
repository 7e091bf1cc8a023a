//! Tests of the command.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

mod backup_runs;
mod backups;
mod bad_sectors;
#[cfg(feature = "bench")]
mod bench;
mod change_lists;
mod check;
mod chunks;
mod compat;
mod control_protocol;
mod copy;
mod discards;
mod doctor;
mod doors;
mod dump;
#[cfg(all(feature = "formats", feature = "fuse", feature = "nbdkit-plugins"))]
mod error_lines;
mod escapes;
mod examples;
#[cfg(all(feature = "restic", feature = "remote"))]
mod fault_proxy;
mod follow;
mod help;
mod http_volumes;
#[cfg(feature = "formats")]
mod image_tools;
mod images;
mod incus;
mod info;
mod jobs;
#[cfg(feature = "formats")]
mod json_log;
mod json_output;
mod kept_jobs;
mod killed;
mod kubevirt;
mod live_backups;
mod live_mirrors;
mod long;
mod machines;
#[cfg(feature = "fuse")]
mod mount;
mod names;
#[cfg(feature = "formats")]
mod noticed;
#[cfg(all(feature = "formats", feature = "remote"))]
mod oci;
#[cfg(feature = "formats")]
mod option_lists;
mod part;
mod proxmox;
mod pull;
#[cfg(feature = "formats")]
mod qemu_img;
#[cfg(feature = "formats")]
mod qemu_nbd;
mod qmp;
mod random_doors;
mod random_qmp;
mod remote;
mod reports;
#[cfg(feature = "restic")]
mod restic;
#[cfg(feature = "restic")]
mod restic_backups;
#[cfg(all(feature = "restic", feature = "remote"))]
mod restic_services;
mod serve;
mod served_disk;
mod service;
mod slow_sources;
mod ssh;
#[cfg(feature = "formats")]
mod stored_bitmaps;
mod targets;
mod tls_relay;
#[cfg(feature = "vddk")]
mod vddk;
#[cfg(feature = "vhost")]
mod virtual_machines;
mod watching;
mod web_servers;
