//! Images written from front to back: QEMU's tools find them in order, and read the same bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockhaul_block::{
    Device, DeviceExt as _, Error, Facts, Kind, LeaseAccess, Op, PendingRequest, Reply, Request,
    Result, emulate, fence,
};
use blockhaul_catalog::Intent;
use blockhaul_formats::qcow2::stream::{Codec, StreamOptions, StreamSink, stream};
use blockhaul_io::{Data, Runtime, RuntimeConfig};
use blockhaul_testkit::conform::{self, ConformOptions, InitialContent, Subject};
use blockhaul_testkit::rng::{self, Rng};

use crate::common::{Qemu, content, open, read_all, with, write};

#[derive(Default)]
struct Taken(Vec<u8>);

impl StreamSink for Taken {
    async fn write(&mut self, bytes: Data) -> Result<()> {
        self.0.extend_from_slice(bytes.bytes());
        Ok(())
    }
}

/// The image of a device.
fn streamed(spec: &str, options: StreamOptions) -> Result<Vec<u8>> {
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
    let spec = spec.to_string();
    runtime.block_on(move || async move {
        let stack = open(&spec, Intent::READ).await?;
        let mut taken = Taken::default();
        let len = stream(stack.device(), options, &mut taken).await?;
        assert_eq!(len, taken.0.len() as u64);
        Ok(taken.0)
    })
}

/// A disk with data that compresses and data that does not, zeroes and holes.
fn disk(rng: &mut Rng, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    for _ in 0..40 {
        let at = rng.below(size as u64) as usize;
        let len = rng.between(1, 200 << 10).min((size - at) as u64) as usize;
        let part = &mut bytes[at..at + len];
        match rng.below(3) {
            0 => rng.fill(part),
            1 => part.fill_with(|| rng.below(5) as u8),
            _ => part.fill(rng.below(3) as u8),
        }
    }
    bytes
}

#[test]
fn an_image_has_the_bytes_of_the_disk_and_is_in_order() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    let mut rng = Rng::new(seed);
    for cluster in [512, 4096, 65536, 2 << 20] {
        let codecs = [None, Some(Codec::Zstd(1)), Some(Codec::Zstd(3)), Some(Codec::Deflate(6))];
        for codec in codecs {
            let size = rng.between(1, 8 << 20) as usize;
            // None, too little, and enough.
            let memory = *rng.pick(&[0, 100 << 10, 1 << 30]);
            let bytes = disk(&mut rng, size);
            let label = format!(
                "clusters of {cluster}, {codec:?}, {size} bytes, {memory} of memory, seed {seed}"
            );
            sparse(&qemu, &bytes);
            let disk = qemu.file("disk").display().to_string();
            let image = streamed(&disk, StreamOptions { cluster, codec, memory }).unwrap();
            write(&qemu.file("image"), &image);
            let found = qemu.img(&["check", "-f", "qcow2", "image"]);
            assert!(found.contains("No errors were found"), "{label}: {found}");
            view(&disk, StreamOptions { cluster, codec, memory }, image, rng.number());
            let mut wanted = bytes.clone();
            wanted.resize(size.next_multiple_of(512), 0);
            assert!(qemu.raw("image") == wanted, "{label}");
            assert!(read_all(&qemu.spec("image", "")).unwrap() == wanted, "{label}");
        }
    }
}

/// Checks that the device `as-qcow2:` has the bytes of an image.
fn view(spec: &str, options: StreamOptions, image: Vec<u8>, seed: u64) {
    let StreamOptions { cluster, codec, memory } = options;
    let level = match codec {
        None => String::new(),
        Some(Codec::Zstd(level)) => format!("&zstd={level}"),
        Some(Codec::Deflate(level)) => format!("&zlib={level}"),
    };
    let spec = format!("as-qcow2:{spec}?cluster={cluster}&memory={memory}{level}");
    let label = spec.clone();
    with(&spec, move |device| async move {
        assert!(content(&device).await.unwrap() == image, "{label}");
        let mut rng = Rng::new(seed);
        for _ in 0..30 {
            let at = rng.below(image.len() as u64);
            let len = rng.between(1, (image.len() as u64 - at).min(200 << 10));
            let found = device.read(at, len as usize).await.unwrap();
            let same = found.bytes() == &image[at as usize..(at + len) as usize];
            assert!(same, "{label}: {len} bytes at {at}, seed {seed}");
            if let Some(lease) = device.file_at(at, len, LeaseAccess::Read) {
                assert!(codec.is_none() && lease.len <= len, "{label}");
            }
        }
    });
}

#[test]
fn an_image_that_is_made_as_it_is_read_keeps_the_contract() {
    for options in ["cluster=512", "cluster=64k", "cluster=16k&zstd=1&memory=20k"] {
        let spec = format!("as-qcow2:sample:3M?{options}");
        let image = read_all(&spec).unwrap();
        let content = InitialContent::oracle(move |at| image[at as usize]);
        conform::check(options, ConformOptions::default().content(content), move || {
            let spec = spec.clone();
            async move { open(&spec, Intent::READ).await.map(Subject::from) }
        });
    }
}

/// Stores a disk with holes.
fn sparse(qemu: &Qemu, bytes: &[u8]) {
    use std::os::unix::fs::FileExt as _;
    let _ = std::fs::remove_file(qemu.file("disk"));
    let file = std::fs::File::create(qemu.file("disk")).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    for (number, page) in bytes.chunks(4096).enumerate() {
        if !blockhaul_io::is_zero(page) {
            file.write_all_at(page, number as u64 * 4096).unwrap();
        }
    }
}

#[test]
fn what_is_compressed_is_as_small_as_qemu_makes_it() {
    let Some(qemu) = Qemu::find() else { return };
    let mut rng = Rng::new(3);
    let bytes: Vec<_> = (0..8 << 20).map(|_| rng.below(20) as u8).collect();
    write(&qemu.file("disk"), &bytes);
    let options = "cluster_size=64k,compression_type=zstd";
    qemu.img(&["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options, "disk", "theirs"]);
    let theirs = std::fs::metadata(qemu.file("theirs")).unwrap().len();
    let spec = qemu.file("disk").display().to_string();
    let ours =
        streamed(&spec, StreamOptions { codec: Some(Codec::Zstd(3)), ..StreamOptions::default() });
    let ours = ours.unwrap().len() as u64;
    assert!(ours * 100 <= theirs * 102, "{ours} {theirs}");
}

#[test]
fn a_huge_disk_without_data_takes_little_time_and_space() {
    let Some(qemu) = Qemu::find() else { return };
    std::fs::File::create(qemu.file("disk")).unwrap().set_len(8 << 40).unwrap();
    let spec = qemu.file("disk").display().to_string();
    for codec in [None, Some(Codec::Zstd(3)), Some(Codec::Deflate(1))] {
        let options = StreamOptions { codec, ..StreamOptions::default() };
        let image = streamed(&spec, options).unwrap();
        assert!(image.len() < 1 << 20, "{}", image.len());
        write(&qemu.file("image"), &image);
        qemu.img(&["check", "-q", "-f", "qcow2", "image"]);
        let map = qemu.img(&["map", "-f", "qcow2", "--output=json", "image"]);
        assert!(map.contains("\"length\": 8796093022208"), "{map}");
    }
    let options = StreamOptions { cluster: 512, ..StreamOptions::default() };
    assert!(
        streamed(&spec, options).unwrap_err().to_string().contains("clusters of more than 512")
    );
}

#[test]
fn options_out_of_range_are_refused() {
    for (cluster, codec) in [
        (0, None),
        (256, None),
        (1000, None),
        (4 << 20, None),
        (512, Some(Codec::Zstd(0))),
        (512, Some(Codec::Zstd(20))),
        (512, Some(Codec::Deflate(0))),
        (512, Some(Codec::Deflate(10))),
    ] {
        let error = streamed("zero:1M", StreamOptions { cluster, codec, memory: 0 }).unwrap_err();
        assert_eq!(error.kind(), Kind::Usage, "{error}");
    }
}

/// Never the same.
struct Restless {
    facts: Arc<Facts>,
    reads: AtomicU64,
}

impl Device for Restless {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Op::Read(room) = request.op else {
            return Error::new(Kind::Invalid, "only reads").into();
        };
        let mut buf = room.into_buf();
        let mut rng = Rng::new(self.reads.fetch_add(1, Ordering::Relaxed));
        let values = rng.between(2, 60);
        buf.fill_with(|| rng.below(values) as u8);
        PendingRequest::ready(Ok(Reply::Data(buf.into())))
    }
}

#[test]
fn a_source_that_changes_is_noticed() {
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    let error = runtime.block_on(|| async {
        let mut facts = Facts::new("restless", 4 << 20);
        facts.can = blockhaul_block::Can::empty();
        let device = Restless { facts: Arc::new(facts), reads: AtomicU64::new(0) };
        let device = fence(emulate::emulate(Arc::new(device)));
        assert!(device.read(0, 512).await.is_ok());
        // What is kept from the first pass is not read again.
        let options = StreamOptions { codec: Some(Codec::Zstd(1)), ..StreamOptions::default() };
        assert!(stream(&device, options, &mut Taken::default()).await.is_ok());
        let options = StreamOptions { memory: 0, ..options };
        stream(&device, options, &mut Taken::default()).await.unwrap_err().to_string()
    });
    assert!(error.contains("has changed while it was read"), "{error}");
}
