//! A real mount of a device that leaves payloads in the kernel: replies go from its pipes to the FUSE
//! device, and readers get the same bytes as from memory. Needs root and FUSE.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use blockhaul_block::{Device, Error, Facts, Kind, Op, PendingRequest, Reply, Request, fence};
use blockhaul_fuse::mountpoint::MountTarget;
use blockhaul_fuse::{DiskMount, Files, MountConfig, PageCacheMode, Permissions, Session};
use blockhaul_io::{Buf, Data, File, IoEngine, ParkedPayload, Runtime};
use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::{self, ScratchDir, SkipReason};

const SIZE: u64 = 8 << 20;
/// Reads that touch this byte fail.
const BAD: u64 = 5 << 20;
const O_DIRECT: i32 = 0o40000;

/// A file, of which payloads stay in the kernel where they may.
struct Stays {
    file: File,
    parked: AtomicUsize,
}

impl Device for Stays {
    fn facts(&self) -> Arc<Facts> {
        Arc::new(Facts::new("stays", SIZE))
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Op::Read(room) = request.op else {
            return PendingRequest::ready(Err(Error::new(Kind::Unsupported, "only reads")));
        };
        if (request.at..request.at + request.len).contains(&BAD) {
            return PendingRequest::ready(Err(Error::new(Kind::Io, "a bad byte")));
        }
        let data = match ParkedPayload::begin(room) {
            Ok(mut parked) => {
                parked.fill_from_file(&self.file, request.at).unwrap();
                assert_eq!(parked.missing(), 0);
                self.parked.fetch_add(1, Ordering::Relaxed);
                Data::from(parked)
            }
            Err(room) => {
                let mut buf: Buf = room.into_buf();
                let got = self.file.read_now(&mut buf, request.at).unwrap();
                assert_eq!(got, buf.len());
                Data::from(buf)
            }
        };
        PendingRequest::ready(Ok(Reply::Data(data)))
    }
}

/// Whether this machine lets us mount; a reason is printed if not.
fn can_mount() -> bool {
    let reason = if !rustix::process::geteuid().is_root() {
        "needs root"
    } else if OpenOptions::new().read(true).write(true).open("/dev/fuse").is_err() {
        "/dev/fuse cannot be opened"
    } else {
        return true;
    };
    tools::skip_or_fail(&SkipReason::new(reason));
    false
}

#[test]
fn payloads_in_the_kernel_arrive_as_they_are_and_errors_stay_errors() {
    if !can_mount() {
        return;
    }
    let seed = seed();
    let mut rng = Rng::new(seed);
    let mut bytes = vec![0; usize::try_from(SIZE).unwrap()];
    rng.fill(&mut bytes);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes).unwrap();
    let stays = Arc::new(Stays { file: File::new(file.into()), parked: AtomicUsize::new(0) });

    let scratch = ScratchDir::new().unwrap();
    let path = scratch.path().join("disk");
    std::fs::write(&path, "").unwrap();
    let permissions = Permissions { uid: 0, gid: 0, write: false, others: false };
    let target = MountTarget::find(&path).unwrap();
    let (mounted, connection) = target.mount("test", &permissions).unwrap();
    rustix::io::ioctl_fionbio(&connection, true).unwrap();
    let config = blockhaul_io::RuntimeConfig { workers: 2, engine: IoEngine::Auto };
    let runtime = Runtime::start(&config).unwrap();
    let session = Session::new(MountConfig {
        disks: vec![DiskMount {
            name: "disk".into(),
            device: fence(stays.clone()),
            write: false,
            source: None,
        }],
        files: Files { info: None, permissions, time: Duration::ZERO },
        cache: PageCacheMode::Open,
        memory: 64 << 20,
    });
    let ended = runtime.remote().spawn(move || session.serve(connection));

    // Through the page cache, up to the bad byte; then bytes behind it.
    let disk = std::fs::File::open(&path).unwrap();
    let mut got = vec![0; 4 << 20];
    disk.read_exact_at(&mut got, 0).unwrap();
    assert!(got == bytes[..got.len()]);
    let direct = OpenOptions::new().read(true).custom_flags(O_DIRECT).open(&path).unwrap();
    let mut all = Buf::unpooled(1 << 20);
    for _ in 0..200 {
        let at = rng.below(SIZE / 512) * 512;
        let len = rng.between(1, 2048) * 512;
        let len = usize::try_from(len.min(SIZE - at)).unwrap();
        let range = at..at + len as u64;
        match direct.read_exact_at(&mut all[..len], at) {
            Ok(()) => {
                let start = usize::try_from(at).unwrap();
                assert!(all[..len] == bytes[start..start + len], "{at}+{len}, seed {seed}");
                assert!(!range.contains(&BAD), "{at}+{len}, seed {seed}");
            }
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(5), "{at}+{len}, seed {seed}");
                assert!(range.contains(&BAD), "{at}+{len}, seed {seed}");
            }
        }
    }
    let parked = stays.parked.load(Ordering::Relaxed);
    assert!(parked > 20, "only {parked} payloads have stayed in the kernel");

    drop((disk, direct));
    mounted.unmount().unwrap();
    runtime.block_on(move || ended).unwrap().unwrap();
}
