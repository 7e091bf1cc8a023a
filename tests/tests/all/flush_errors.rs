//! Disks that lose data when it is written back, which the kernel reports once: loop devices over a file
//! system that is full. They need root; `BLOCKHAUL_LONG` runs them.

use std::path::Path;

use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::{self, ScratchDir};
use blockhaul_tests::disks::LossyDisk;
use blockhaul_tests::{lossy, run, serve};
use blockhaul_wire::request::RequestHeader;
use blockhaul_wire::{CommandCode as Ask, CommandFlags, ReplyForm};

const EIO: u32 = 5;
const SIZE: u64 = 64 << 20;
/// The capacity of the file system.
const ROOM: u64 = 8 << 20;
/// More than that.
const WRITTEN: u64 = 12 << 20;
const PIECE: u64 = 1 << 20;

/// A disk that is too small for what is written onto it. `None` if the long tests do not run, or where
/// this machine does not let us.
fn full() -> Option<LossyDisk> {
    if !tools::runs_long() {
        return None;
    }
    LossyDisk::full(SIZE, ROOM)
}

fn connect(socket: &Path) -> Conversation {
    let mut client = Conversation::connect(socket).unwrap();
    client.open("", ReplyForm::Structured).unwrap();
    client
}

fn flush(client: &mut Conversation) -> u32 {
    let request = client.request(Ask::Flush, 0, 0);
    client.ask(&request, &[]).unwrap().error
}

fn write(client: &mut Conversation, at: u64, flags: CommandFlags) -> u32 {
    let request = client.request(Ask::Write, at, PIECE);
    let request = RequestHeader { flags, ..request };
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
            let Some(disk) = full() else { return };
            let scratch = ScratchDir::new().unwrap();
            let args: Vec<&str> = options.iter().copied().chain([disk.device()]).collect();
            let server = serve(&scratch, "s", &args);
            let mut a = connect(server.socket());
            let mut b = connect(server.socket());
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
        let Some(disk) = full() else { return };
        let scratch = ScratchDir::new().unwrap();
        let server = serve(&scratch, "s", &[disk.device()]);
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
        let Some(disk) = full() else { return };
        let mut args = vec!["copy", "--flush", "--no-progress", "--retry-delay=20ms"];
        args.extend(options);
        args.extend(["random:48M", disk.device()]);
        let output = run(&args);
        let said = lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(5 | 6)), "{options:?}: {said}");
    }
}
