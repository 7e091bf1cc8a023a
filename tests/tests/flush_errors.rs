//! Disks that lose data when it is written back, which the kernel reports once: loop devices over a file
//! system that is full. They need root; `BLOCKHAUL_LONG` runs them.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use blockhaul_tests::{LIMIT, lossy, run, serve, text};
use testkit::peer::Conversation;
use testkit::rng::Rng;
use testkit::tools::{self, Scratch};
use wire::request::Header;
use wire::{Command as Ask, CommandFlags, Replies};

const EIO: u32 = 5;
const SIZE: u64 = 64 << 20;
/// What the file system has room for.
const ROOM: &str = "size=8m";
/// More than that.
const WRITTEN: u64 = 12 << 20;
const PIECE: u64 = 1 << 20;

/// A disk of 64 MiB that can store 8; until it is dropped.
struct Full {
    folder: PathBuf,
    device: String,
    _scratch: Scratch,
}

fn ok(program: &str, args: &[&str]) -> Option<String> {
    let output = tools::output(Command::new(program).args(args), LIMIT).ok()?;
    if !output.status.success() {
        eprintln!("skipped: {program} {args:?}: {}", lossy(&output.stderr));
        return None;
    }
    Some(lossy(&output.stdout).trim().to_string())
}

impl Full {
    /// `None` where this machine does not let us, or nobody asked for it.
    fn new() -> Option<Full> {
        if std::env::var_os("BLOCKHAUL_LONG").is_none() {
            eprintln!("skipped: set BLOCKHAUL_LONG");
            return None;
        }
        let scratch = Scratch::on_disk().unwrap();
        let folder = scratch.file("full");
        std::fs::create_dir(&folder).unwrap();
        ok("mount", &["-t", "tmpfs", "-o", ROOM, "tmpfs", text(&folder)])?;
        let file = folder.join("disk");
        std::fs::File::create(&file).unwrap().set_len(SIZE).unwrap();
        let device = ok("losetup", &["--find", "--show", text(&file)]);
        let full = Full { folder, device: device.clone().unwrap_or_default(), _scratch: scratch };
        device.map(|_| full)
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        if !self.device.is_empty() {
            ok("losetup", &["--detach", &self.device]);
        }
        // Lazily: the loop device lets go of the file by and by.
        ok("umount", &["--lazy", text(&self.folder)]);
    }
}

fn connect(socket: &Path) -> Conversation {
    let mut client = Conversation::connect(socket).unwrap();
    client.open("", Replies::Structured).unwrap();
    client
}

fn flush(client: &mut Conversation) -> u32 {
    let request = client.request(Ask::Flush, 0, 0);
    client.ask(&request, &[]).unwrap().error
}

fn write(client: &mut Conversation, at: u64, flags: CommandFlags) -> u32 {
    let request = client.request(Ask::Write, at, PIECE);
    let request = Header { flags, ..request };
    let mut bytes = vec![0; PIECE as usize];
    Rng::new(at).fill(&mut bytes);
    client.ask(&request, &bytes).unwrap().error
}

fn write_much(client: &mut Conversation, at: u64) {
    for piece in (0..WRITTEN).step_by(PIECE as usize) {
        assert_eq!(write(client, at + piece, CommandFlags::NONE), 0);
    }
}

#[test]
fn all_clients_of_a_server_hear_of_a_flush_that_failed() {
    for options in [&[][..], &["--per-client"], &["--layer", "offset?offset=0"]] {
        for rounds in 0..3 {
            let Some(disk) = Full::new() else { return };
            let scratch = Scratch::new().unwrap();
            let args: Vec<&str> = options.iter().copied().chain([&*disk.device]).collect();
            let server = serve(&scratch, "s", &args);
            let (mut a, mut b) = (connect(server.socket()), connect(server.socket()));
            write_much(&mut a, 0);
            write_much(&mut b, 16 << 20);
            let what = format!("{options:?}, round {rounds}");
            assert_eq!(flush(&mut a), EIO, "{what}");
            assert_eq!(flush(&mut b), EIO, "{what}");
            assert_eq!(flush(&mut a), EIO, "{what}");
            assert_eq!(write(&mut b, 0, CommandFlags::FUA), EIO, "{what}");
            if options.is_empty() {
                // The server has the disk open.
                drop((a, b));
                assert_eq!(flush(&mut connect(server.socket())), EIO, "{what}");
            }
        }
    }
}

#[test]
fn flushes_that_overlap_do_not_hide_the_failure_from_each_other() {
    for round in 0..5 {
        let Some(disk) = Full::new() else { return };
        let scratch = Scratch::new().unwrap();
        let server = serve(&scratch, "s", &[&disk.device]);
        let mut clients: Vec<_> = (0..4).map(|_| connect(server.socket())).collect();
        for (index, client) in clients.iter_mut().enumerate() {
            write_much(client, index as u64 * (16 << 20));
        }
        let told: Vec<u32> = std::thread::scope(|scope| {
            let flushing: Vec<_> =
                clients.iter_mut().map(|client| scope.spawn(|| flush(client))).collect();
            flushing.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert_eq!(told, [EIO; 4], "round {round}");
    }
}

#[test]
fn a_copy_onto_a_disk_that_loses_data_fails() {
    for options in [&[][..], &["--direct=off"], &["-C", "4", "--segment", "4m", "--direct=off"]] {
        let Some(disk) = Full::new() else { return };
        let mut args = vec!["copy", "--flush", "--no-progress", "--retry-delay=20ms"];
        args.extend(options);
        args.extend(["random:48M", &disk.device]);
        let output = run(&args);
        let said = lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(5 | 6)), "{options:?}: {said}");
    }
}
