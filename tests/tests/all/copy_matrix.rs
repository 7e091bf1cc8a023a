//! `blockhaul copy` between every pair of {our server, nbdkit with a file, nbdkit with memory, qemu-nbd
//! on raw, qemu-nbd on qcow2, a local file}: contents to the byte, and holes.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use blockhaul_testkit::image;
use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng::{self, Rng};
use blockhaul_testkit::tools::{PeerProgram, PeerServer, ScratchDir};
use blockhaul_tests::{
    allocated, assert_same, blockhaul, done, garbage, nonzero, peer, serve, succeed, text,
};

/// The programs on the other ends.
struct Peers {
    nbdkit: PeerProgram,
    nbdcopy: PeerProgram,
    nbdinfo: PeerProgram,
    qemu_nbd: PeerProgram,
    qemu_img: PeerProgram,
}

impl Peers {
    fn find() -> Option<Peers> {
        Some(Peers {
            nbdkit: require_peer!("nbdkit", None),
            nbdcopy: require_peer!("nbdcopy", None),
            nbdinfo: require_peer!("nbdinfo", None),
            qemu_nbd: require_peer!("qemu-nbd", None),
            qemu_img: require_peer!("qemu-img", None),
        })
    }
}

/// What a copy reads from or writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// `blockhaul serve` of a file.
    Ours,
    /// nbdkit's file plugin.
    NbdkitFile,
    /// nbdkit's memory plugin, filled and emptied by nbdcopy.
    NbdkitMemory,
    /// qemu-nbd of a raw file.
    QemuRaw,
    /// qemu-nbd of a qcow2 file.
    QemuQcow2,
    /// A file.
    File,
}

impl End {
    const ALL: [End; 6] =
        [End::Ours, End::NbdkitFile, End::NbdkitMemory, End::QemuRaw, End::QemuQcow2, End::File];

    /// Whether it takes any size. QEMU's images are made of sectors.
    fn takes_odd_sizes(self) -> bool {
        !matches!(self, End::QemuRaw | End::QemuQcow2)
    }
}

/// An end that is set up: its address, the file behind it, and its server.
struct Place {
    end: End,
    address: String,
    file: PathBuf,
    server: Option<PeerServer>,
}

impl Place {
    /// Serves a copy of `image`, in `dir` under names that begin with `tag`.
    fn source(end: End, image: &Path, peers: &Peers, dir: &ScratchDir, tag: &str) -> Place {
        let file = match end {
            End::QemuQcow2 => {
                let file = dir.file(&format!("{tag}.qcow2"));
                let args = ["convert", "-f", "raw", "-O", "qcow2", text(image), text(&file)];
                peer(&peers.qemu_img, &args);
                file
            }
            _ => image.to_owned(),
        };
        let size = image::space(image).unwrap().apparent;
        let place = Place::open(end, file, size, true, peers, dir, tag);
        if end == End::NbdkitMemory {
            peer(&peers.nbdcopy, &[text(image), &place.address]);
        }
        place
    }

    /// Something of `size` bytes to write to, either empty or full of garbage.
    fn target(
        end: End,
        size: u64,
        filled: bool,
        peers: &Peers,
        dir: &ScratchDir,
        tag: &str,
    ) -> Place {
        let file = dir.file(&format!("{tag}.raw"));
        if filled {
            // What is in a local file, and behind its end, is gone afterwards.
            garbage(&file, size + if end == End::File { 1 << 20 } else { 0 }).unwrap();
        } else if end != End::File {
            File::create(&file).unwrap().set_len(size).unwrap();
        }
        let file = match end {
            End::QemuQcow2 => {
                let qcow2 = dir.file(&format!("{tag}.qcow2"));
                if filled {
                    let args = ["convert", "-f", "raw", "-O", "qcow2", text(&file), text(&qcow2)];
                    peer(&peers.qemu_img, &args);
                } else {
                    let args = ["create", "-q", "-f", "qcow2", text(&qcow2), &size.to_string()];
                    peer(&peers.qemu_img, &args);
                }
                qcow2
            }
            _ => file,
        };
        let place = Place::open(end, file, size, false, peers, dir, tag);
        if end == End::NbdkitMemory && filled {
            peer(&peers.nbdcopy, &[text(&place.file), &place.address]);
        }
        place
    }

    fn open(
        end: End,
        file: PathBuf,
        size: u64,
        readonly: bool,
        peers: &Peers,
        dir: &ScratchDir,
        tag: &str,
    ) -> Place {
        let name = format!("{tag}.s");
        let path = text(&file);
        let mut options = if readonly { vec!["-r"] } else { Vec::new() };
        let server = match end {
            End::Ours => Some(serve(dir, &name, &[&options[..], &[path]].concat())),
            End::NbdkitFile => {
                options.extend(["file", path]);
                Some(PeerServer::nbdkit(&peers.nbdkit, &dir.socket(&name), &options).unwrap())
            }
            End::NbdkitMemory => {
                let size = size.to_string();
                let args = ["memory", &size];
                Some(PeerServer::nbdkit(&peers.nbdkit, &dir.socket(&name), &args).unwrap())
            }
            End::QemuRaw | End::QemuQcow2 => {
                let format = if end == End::QemuRaw { "raw" } else { "qcow2" };
                options.extend(["-e", "16", "-f", format, "--discard=unmap", path]);
                Some(PeerServer::qemu_nbd(&peers.qemu_nbd, &dir.socket(&name), &options).unwrap())
            }
            End::File => None,
        };
        let address = server.as_ref().map_or(path.to_owned(), |server| server.uri(""));
        Place { end, address, file, server }
    }

    /// Compares what it holds with `image`, by other programs than ours, and checks that it holds
    /// little more than the image's data: where the copy looked for zeroes everywhere (`sparse`), what
    /// is not zero, else what is no hole. Stops the server.
    fn check(self, image: &Path, sparse: bool, peers: &Peers, dir: &ScratchDir, what: &str) {
        // A block of data may be cut out of a run at any byte; a cluster of qcow2 and a page of
        // nbdkit's memory are larger than ours.
        let grain = match self.end {
            End::QemuQcow2 => 64 << 10,
            End::NbdkitMemory => 32 << 10,
            _ => 4096,
        };
        let count = if sparse { nonzero } else { allocated };
        let expected = count(image, grain).unwrap();
        let stored = match self.end {
            End::NbdkitMemory => {
                let copied = dir.file("memory.raw");
                peer(&peers.nbdcopy, &[&self.address, text(&copied)]);
                assert_same(image, &copied, what);
                std::fs::remove_file(&copied).unwrap();
                let map = peer(&peers.nbdinfo, &["--map", "--json", &self.address]);
                let map: serde_json::Value = serde_json::from_str(&map).unwrap();
                let data = map.as_array().unwrap().iter().filter(|extent| extent["type"] == 0);
                data.map(|extent| extent["length"].as_u64().unwrap()).sum()
            }
            End::QemuQcow2 => {
                // Its metadata is written when it is asked to flush, or to end.
                self.server.unwrap().stop().unwrap();
                let file = text(&self.file);
                peer(&peers.qemu_img, &["check", "-q", file]);
                let args = ["compare", "-q", "-f", "raw", "-F", "qcow2", text(image), file];
                peer(&peers.qemu_img, &args);
                image::space(&self.file).unwrap().allocated
            }
            _ => {
                drop(self.server);
                assert_same(image, &self.file, what);
                image::space(&self.file).unwrap().allocated
            }
        };
        // Metadata of qcow2, and of file systems.
        let slack = (1 << 20) + expected / 50;
        assert!(
            stored <= expected + slack,
            "{what}: the target stores {stored} bytes, the source has {expected} bytes of data"
        );
    }
}

/// Copies an image between every pair that its size allows, on two threads.
fn every_pair(image: &Path, filled: bool, on_disk: bool, options: &[&str], peers: &Peers) {
    let scratch = || if on_disk { ScratchDir::on_disk() } else { ScratchDir::new() }.unwrap();
    let size = image::space(image).unwrap().apparent;
    let fits = |end: &End| size.is_multiple_of(512) || end.takes_odd_sizes();
    let dir = scratch();
    let ends: Vec<End> = End::ALL.into_iter().filter(fits).collect();
    let place = |(n, end): (usize, &End)| Place::source(*end, image, peers, &dir, &n.to_string());
    let sources: Vec<Place> = ends.iter().enumerate().map(place).collect();
    let pairs: Vec<(&Place, End)> =
        sources.iter().flat_map(|source| ends.iter().map(move |end| (source, *end))).collect();
    let next = AtomicUsize::new(0);
    let sparse = options.contains(&"-S");
    let work = || {
        while let Some((source, end)) = pairs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let dir = scratch();
            let begun = Instant::now();
            let target = Place::target(*end, size, filled, peers, &dir, "t");
            let what = format!("{:?} to {end:?}, {size} bytes, filled: {filled}", source.end);
            let mut args = vec!["copy"];
            args.extend(options);
            args.extend([source.address.as_str(), target.address.as_str()]);
            done(&mut blockhaul(&args));
            let copied = begun.elapsed();
            target.check(image, sparse, peers, &dir, &what);
            println!("{what}: copied in {copied:.2?}, checked in {:.2?}", begun.elapsed() - copied);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(work);
        work();
    });
}

/// An ext4 of real files.
fn ext4(scratch: &ScratchDir, size: u64, content_max: u64) -> Option<PathBuf> {
    require_peer!("mkfs.ext4", None);
    let image = scratch.file("ext4.raw");
    let folder =
        Path::new(if Path::new("/usr/share/doc").is_dir() { "/usr/share" } else { "/usr" });
    image::ext4(&image, size, folder, content_max).unwrap();
    Some(image)
}

#[test]
fn a_real_ext4_between_every_pair() {
    let Some(peers) = Peers::find() else { return };
    let scratch = ScratchDir::new().unwrap();
    let Some(image) = ext4(&scratch, 300 << 20, 150 << 20) else { return };
    every_pair(&image, false, false, &[], &peers);
}

#[test]
fn a_real_ext4_over_garbage_on_disk() {
    let Some(peers) = Peers::find() else { return };
    let scratch = ScratchDir::on_disk().unwrap();
    let Some(image) = ext4(&scratch, 64 << 20, 40 << 20) else { return };
    every_pair(&image, true, true, &["--verify", "--flush", "-S", "4096"], &peers);
}

#[test]
fn random_images_of_odd_sizes() {
    let Some(peers) = Peers::find() else { return };
    let scratch = ScratchDir::new().unwrap();
    let seed = rng::seed();
    println!("BLOCKHAUL_SEED={seed}");
    let mut rng = Rng::new(seed);
    // Sizes in bytes and in sectors, over nothing and over garbage.
    let rounds: [(u64, bool, &[&str]); 4] = [
        (1, false, &["--verify"]),
        (512, false, &["-S", "4096"]),
        (1, true, &["-S", "4096"]),
        (512, true, &["--verify", "--engine", "threads"]),
    ];
    for (round, (unit, filled, options)) in rounds.into_iter().enumerate() {
        let size = rng.between(1, (32 << 20) / unit) * unit;
        let image = scratch.file(&format!("{round}.raw"));
        image::sparse(&image, size, rng.number()).unwrap();
        every_pair(&image, filled, false, options, &peers);
    }
}

/// What lies behind the source's end is none of the copy's business.
#[test]
fn a_larger_target_keeps_its_tail() {
    let Some(peers) = Peers::find() else { return };
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let seed = rng::seed();
    println!("BLOCKHAUL_SEED={seed}");
    let size = (3 << 20) + Rng::new(seed).below(5000);
    image::sparse(&image, size, seed).unwrap();
    let larger = size.next_multiple_of(512) + (1 << 20);
    for (end, tag) in [(End::Ours, "0"), (End::NbdkitFile, "1"), (End::QemuRaw, "2")] {
        let target = Place::target(end, larger, true, &peers, &scratch, tag);
        succeed(&["copy", "--verify", text(&image), &target.address]);
        drop(target.server);
        image::compare_ranges((&image, 0), (&target.file, 0), size)
            .unwrap_or_else(|difference| panic!("{end:?}: {difference}"));
        let untouched = scratch.file("untouched");
        garbage(&untouched, larger).unwrap();
        image::compare_ranges((&untouched, size), (&target.file, size), larger - size)
            .unwrap_or_else(|difference| panic!("{end:?}, behind the end: {difference}"));
    }
}

/// qemu-nbd's default is one client at a time: the second connection waits for ever.
#[test]
fn servers_for_one_client_are_copied_from_and_to() {
    let Some(peers) = Peers::find() else { return };
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let target = scratch.file("target");
    let seed = rng::seed();
    println!("BLOCKHAUL_SEED={seed}");
    image::sparse(&image, 200 << 20, seed).unwrap();
    garbage(&target, 200 << 20).unwrap();
    let one = |name: &str, file: &Path| {
        let args = ["-e", "1", "-f", "raw", text(file)];
        PeerServer::qemu_nbd(&peers.qemu_nbd, &scratch.socket(name), &args).unwrap()
    };
    let from = one("s", &image);
    let to = one("t", &target);
    succeed(&["copy", "-C", "4", &from.uri(""), &to.uri("")]);
    drop((from, to));
    assert_same(&image, &target, "one client at a time");
}

/// Servers that their clients start.
#[test]
fn servers_started_for_the_copy() {
    let Some(peers) = Peers::find() else { return };
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let target = scratch.file("target.qcow2");
    let seed = rng::seed();
    println!("BLOCKHAUL_SEED={seed}");
    let size = 64 << 20;
    image::sparse(&image, size, seed).unwrap();
    peer(&peers.qemu_img, &["create", "-q", "-f", "qcow2", text(&target), &size.to_string()]);
    let from = ["[", "nbdkit", "-r", "file", text(&image), "]"];
    let to = ["[", "qemu-nbd", "-f", "qcow2", text(&target), "]"];
    succeed(&[&["copy", "--flush"], &from[..], &to[..]].concat());
    let args = ["compare", "-q", "-f", "raw", "-F", "qcow2", text(&image), text(&target)];
    peer(&peers.qemu_img, &args);
    let program = text(blockhaul_tests::program());
    let raw = scratch.file("target.raw");
    File::create(&raw).unwrap().set_len(size).unwrap();
    let from = ["[", program, "serve", "-r", text(&image), "]"];
    let to = ["[", "blockhaul", "serve", text(&raw), "]"];
    succeed(&[&["copy"], &from[..], &to[..]].concat());
    assert_same(&image, &raw, "between servers of ours");
}
