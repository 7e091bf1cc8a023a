//! A guess at a device's contents, by the `file` program, as in nbdinfo.

use std::fs::File;
use std::io::{Seek as _, Write as _};
use std::process::{Command, Stdio};
use std::sync::Arc;

use blockhaul_block::{Device, DeviceExt as _};
use blockhaul_catalog::Stack;

/// Number of leading bytes to inspect (nbdinfo, info/show.c).
const LOOKED_AT: u64 = 8192;

/// The apparent contents of a device; none if it cannot be read or there is no `file` program: a
/// failure must not affect the rest of the output.
pub(crate) async fn guess(device: Arc<dyn Device>) -> Option<String> {
    // Fenced, so that parts of blocks can be read. The server may refuse the last one.
    let device = Stack::over(device).device().clone();
    let facts = device.facts();
    let len = (facts.size - u64::from(facts.tail)).min(LOOKED_AT);
    let bytes = match usize::try_from(len).ok()? {
        0 => Vec::new(),
        len => device.read(0, len).await.ok()?.bytes().to_vec(),
    };
    blockhaul_io::offload(move || ask_file(&bytes)).await.ok()?
}

fn ask_file(bytes: &[u8]) -> Option<String> {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::memfd_create("content", flags).ok()?);
    file.write_all(bytes).ok()?;
    file.rewind().ok()?;
    let mut command = Command::new("file");
    // By name, not as a stream: the output of `file` differs.
    command.args(["-b", "-L", "/proc/self/fd/0"]);
    let output = command.stdin(Stdio::from(file)).stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.strip_suffix('\n').unwrap_or(&text);
    (output.status.success() && !line.is_empty()).then(|| line.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_file_says_is_taken() {
        if Command::new("file").arg("--version").output().is_err() {
            return blockhaul_testkit::tools::skip_or_fail(
                &blockhaul_testkit::tools::SkipReason::new("file(1) is not installed"),
            );
        }
        assert_eq!(ask_file(b"").unwrap(), "empty");
        assert_eq!(ask_file(b"hello\n").unwrap(), "ASCII text");
    }
}
