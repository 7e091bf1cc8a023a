//! Repositories as devices, for tests.

use std::fs;
use std::path::{Path, PathBuf};

use blockhaul_block::{Reply, Request, Result};
use blockhaul_catalog::{DeviceSpec, Intent, Registry, Stack};
use blockhaul_io::Reservation;

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
