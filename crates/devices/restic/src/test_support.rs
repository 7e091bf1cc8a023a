//! Repositories as devices, for tests.

use std::fs;
use std::path::{Path, PathBuf};

use blockhaul_block::{Reply, Request, Result};
use blockhaul_catalog::{DeviceSpec, Intent, Registry, Stack};
use blockhaul_io::{Data, Reservation};

pub(crate) fn on_a_worker<T: Send + 'static, F: Future<Output = T> + 'static>(
    work: impl FnOnce() -> F + Send + 'static,
) -> T {
    blockhaul_io::Runtime::start(&blockhaul_io::RuntimeConfig::default()).unwrap().block_on(work)
}

pub(crate) fn registry() -> Registry {
    let limit = std::time::Duration::from_secs(10);
    let options = crate::ResticOptions { connect_timeout: limit, timeout: limit };
    Registry { backends: crate::all(options), ..Registry::default() }
}

pub(crate) async fn open(spec: &str) -> Result<Stack> {
    registry().open(&DeviceSpec::parse(spec.as_ref())?, Vec::new(), Intent::READ).await
}

/// All bytes, in requests of `step` bytes, several at a time.
pub(crate) async fn read_all(stack: &Stack, step: usize) -> Result<Vec<u8>> {
    let size = stack.device().facts().size;
    let mut pending = Vec::new();
    for at in (0..size).step_by(step) {
        let room = Reservation::unpooled((step as u64).min(size - at) as usize);
        let len = room.len();
        pending.push((len, stack.device().submit(Request::read(at, room))));
    }
    let mut bytes = Vec::new();
    for (len, request) in pending {
        match request.await? {
            Reply::Data(data) => bytes.extend_from_slice(data.bytes()),
            Reply::Hole => bytes.resize(bytes.len() + len, 0),
            other => panic!("{other:?}"),
        }
    }
    Ok(bytes)
}

/// All files below a folder, in order.
pub(crate) fn files_below(folder: &Path) -> Vec<PathBuf> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_path_buf()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    files
}

/// A write of bytes, or of zeroes.
#[derive(Debug, Clone)]
pub(crate) enum TestWrite {
    Bytes(u64, Vec<u8>),
    Zeroes(u64, u64),
}

impl TestWrite {
    pub(crate) fn apply(&self, disk: &mut [u8]) {
        match self {
            TestWrite::Bytes(at, bytes) => {
                disk[*at as usize..][..bytes.len()].copy_from_slice(bytes)
            }
            TestWrite::Zeroes(at, len) => disk[*at as usize..][..*len as usize].fill(0),
        }
    }

    pub(crate) fn request(&self) -> Request {
        match self {
            TestWrite::Bytes(at, bytes) => Request::write(*at, Data::copy_of(bytes)),
            TestWrite::Zeroes(at, len) => Request::zero(*at, *len),
        }
    }
}

/// Carries out a copy to `spec`: of a disk of this size, or of parts of the earlier backup. Returns the bytes that the
/// target then has.
pub(crate) fn back_up(spec: &str, size: Option<u64>, writes: Vec<TestWrite>) -> Result<Vec<u8>> {
    let spec = spec.to_owned();
    on_a_worker(move || async move {
        let intent = size.map_or(Intent::TARGET, Intent::target);
        let spec = DeviceSpec::parse(spec.as_ref())?;
        let (stack, preparation) = registry().open_target(&spec, Vec::new(), intent).await?;
        preparation.run().await?;
        let device = stack.device();
        // Overlapping writes are in order.
        let mut pending: Vec<(std::ops::Range<u64>, _)> = Vec::new();
        for write in &writes {
            let request = write.request();
            let range = request.at..request.at + request.len;
            let meets =
                |other: &std::ops::Range<u64>| other.start < range.end && range.start < other.end;
            if pending.iter().any(|(other, _)| meets(other)) {
                for (_, earlier) in pending.drain(..) {
                    earlier.await?;
                }
            }
            pending.push((range, device.submit(request)));
        }
        for (_, write) in pending {
            write.await?;
        }
        device.submit(Request::flush()).await?;
        read_all(&stack, 700_000).await
    })
}
