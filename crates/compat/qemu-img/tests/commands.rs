//! Commands in a host of a few lines: what they print and return.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use blockhaul_catalog::Registry;
use blockhaul_qemu_img::{
    CopyObserver, QemuImg, QemuImgError, QemuImgErrorKind, QemuImgHost, QemuImgStatus,
};

/// A stream that keeps what is written, or fails.
#[derive(Clone, Default)]
struct Stream {
    bytes: Arc<Mutex<Vec<u8>>>,
    error: Option<ErrorKind>,
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.error {
            Some(kind) => Err(kind.into()),
            None => self.bytes.lock().unwrap().write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Stream {
    /// What was written since the last call.
    fn take(&self) -> String {
        String::from_utf8(std::mem::take(&mut *self.bytes.lock().unwrap())).unwrap()
    }
}

fn registry() -> Registry {
    let mut backends = blockhaul_backends::all();
    backends.extend(blockhaul_formats::all());
    Registry { backends, path: blockhaul_backends::PATH_SCHEME, ..Registry::default() }
}

/// qemu-img in a folder of its own.
struct Setup {
    folder: tempfile::TempDir,
    output: Stream,
    tool: QemuImg,
}

impl Setup {
    fn new() -> Setup {
        Setup::with(Stream::default(), Box::new(|_| Ok(())))
    }

    fn with(output: Stream, on_copy: Box<CopyObserver>) -> Setup {
        let tool = QemuImg::new(QemuImgHost {
            registry: Box::new(|_, _| registry()),
            output: Box::new(output.clone()),
            messages: Box::new(Stream::default()),
            on_copy,
        });
        Setup { folder: tempfile::tempdir().unwrap(), output, tool }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs a command line in which `@` is the folder.
    fn run(&self, line: &str) -> Result<QemuImgStatus, QemuImgError> {
        let folder = format!("{}/", self.folder.path().display());
        let words: Vec<_> = line
            .split_whitespace()
            .map(|word| OsString::from(word.replace('@', &folder)))
            .collect();
        self.tool.run(&words)
    }

    /// Runs a command that succeeds, and returns what it prints.
    fn printed(&self, line: &str) -> String {
        assert_eq!(self.run(line), Ok(QemuImgStatus::Success), "{line}");
        self.output.take()
    }

    /// Runs a command that fails, and returns the kind of the error.
    fn kind(&self, line: &str) -> QemuImgErrorKind {
        self.run(line).unwrap_err().kind()
    }
}

#[test]
fn images_are_made_described_and_checked() {
    let setup = Setup::new();
    let made = setup.printed("create -f qcow2 @a 1M");
    assert!(made.starts_with("Formatting '") && made.contains(" size=1048576 "), "{made}");
    let told = setup.printed("info --output=json @a");
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!((&told["format"], &told["virtual-size"]), (&"qcow2".into(), &(1 << 20).into()));
    assert!(setup.printed("check @a").starts_with("No errors were found"));
    assert_eq!(setup.printed("resize -q @a +1M"), "");
    assert!(setup.printed("info @a").contains("virtual size: 2 MiB (2097152 bytes)"));
    std::fs::write(setup.file("raw"), [0; 512]).unwrap();
    assert_eq!(setup.kind("check @raw"), QemuImgErrorKind::CheckUnsupported);
    assert_eq!(setup.kind("resize @a much"), QemuImgErrorKind::Failed);
    assert_eq!(setup.kind("measure -O qcow2 -o cluster_size=0 @a"), QemuImgErrorKind::Failed);
    assert_eq!(setup.kind("no-command @a"), QemuImgErrorKind::Failed);
}

#[test]
fn disks_are_copied_and_compared() {
    let setup = Setup::new();
    let mut bytes = vec![7; 1 << 20];
    std::fs::write(setup.file("raw"), &bytes).unwrap();
    setup.printed("convert -f raw -O qcow2 @raw @image");
    let same = setup.printed("compare -f raw -F qcow2 @raw @image");
    assert_eq!(same, "Images are identical.\n");
    bytes[70_000] = 8;
    std::fs::write(setup.file("raw"), &bytes).unwrap();
    assert_eq!(setup.run("compare -f raw @raw @image"), Ok(QemuImgStatus::Different));
    assert_eq!(setup.output.take(), "Content mismatch at offset 69632!\n");
    assert_eq!(setup.kind("compare @raw @nowhere"), QemuImgErrorKind::CompareOpen);
    // An image that exists keeps what is in it.
    setup.printed("snapshot -c one @image");
    setup.printed("convert -n -f raw -O qcow2 @raw @image");
    setup.printed("compare -f raw @raw @image");
    assert!(setup.printed("snapshot -l @image").contains("one"));
}

#[test]
fn the_host_refuses_or_cancels_copies() {
    let refuses: Box<CopyObserver> = Box::new(|_| Err("not now".to_string()));
    let cancels: Box<CopyObserver> = Box::new(|copy| {
        copy.progress().cancel();
        Ok(())
    });
    let expected = [
        (refuses, QemuImgErrorKind::Failed, "not now"),
        (cancels, QemuImgErrorKind::Cancelled, "stopped by a signal"),
    ];
    for (observer, kind, text) in expected {
        let setup = Setup::with(Stream::default(), observer);
        std::fs::write(setup.file("raw"), [7; 4096]).unwrap();
        let error = setup.run("convert -f raw -O raw @raw @copy").unwrap_err();
        assert_eq!(error.kind(), kind);
        assert!(error.to_string().starts_with(text), "{error}");
    }
    assert_eq!(QemuImgErrorKind::Cancelled.code(), None);
}

#[test]
fn a_closed_pipe_is_no_failure() {
    for (error, succeeds) in [(ErrorKind::BrokenPipe, true), (ErrorKind::StorageFull, false)] {
        let output = Stream { error: Some(error), ..Stream::default() };
        let setup = Setup::with(output, Box::new(|_| Ok(())));
        assert_eq!(setup.run("--version").is_ok(), succeeds);
    }
}
