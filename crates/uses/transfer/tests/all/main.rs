//! Copies by requests: what is refused before a target is touched, and what is copied.

#![allow(clippy::unwrap_used, reason = "a test that fails")]

use std::fs;
use std::path::{Path, PathBuf};

use blockhaul_catalog::{DeviceSpec, Intent, Registry};
use blockhaul_engine::Side;
use blockhaul_io::{Pool, Runtime, RuntimeConfig};
use blockhaul_transfer::{
    CopyEnd, CopyReport, CopyRequest, CopySetup, Endpoint, NamedOption, TargetState, TransferError,
    TransferErrorKind, TransferOptions, TransferStep,
};

const SIZE: usize = 1 << 20;

/// A folder with a source.
struct Lab {
    folder: tempfile::TempDir,
    runtime: Runtime,
}

impl Lab {
    fn new() -> Lab {
        let folder = tempfile::tempdir().unwrap();
        let lab = Lab { folder, runtime: Runtime::start(&RuntimeConfig::default()).unwrap() };
        fs::write(lab.path("source"), contents(1)).unwrap();
        lab
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A copy of `source` to `target`.
    fn request(&self) -> CopyRequest {
        let [source, target] = ["source", "target"].map(|name| DeviceSpec::Path(self.path(name)));
        CopyRequest::new(Endpoint::Device(source), Endpoint::Device(target))
    }

    fn run(&self, request: CopyRequest) -> Result<CopyReport, TransferError> {
        self.runtime.block_on(move || async move {
            request.open(&registry()).await?.run(Pool::new(64 << 20)).await
        })
    }

    fn refused(&self, request: CopyRequest) -> TransferError {
        self.run(request).expect_err("it is refused")
    }
}

fn registry() -> Registry {
    Registry {
        backends: blockhaul_backends::all(),
        path: blockhaul_backends::PATH_SCHEME,
        ..Registry::default()
    }
}

/// Contents of a disk.
fn contents(seed: usize) -> Vec<u8> {
    (0..SIZE).map(|at| ((at * 7 + at / 4096 + seed) % 251) as u8).collect()
}

fn is_changed(path: &Path) -> bool {
    fs::read(path).unwrap() != b"old"
}

#[test]
fn a_request_copies_verifies_and_reports() {
    let lab = Lab::new();
    let mut request = lab.request();
    request.options.verify = true;
    let report = lab.run(request).unwrap();
    assert_eq!((report.end, report.verified), (CopyEnd::Complete, SIZE as u64));
    assert_eq!(fs::read(lab.path("target")).unwrap(), contents(1));
}

#[test]
fn open_devices_are_copied_and_keep_the_rest_of_a_target() {
    let lab = Lab::new();
    fs::write(lab.path("target"), contents(2)).unwrap();
    let [source, target] = ["source", "target"].map(|name| DeviceSpec::Path(lab.path(name)));
    lab.runtime.block_on(move || async move {
        let open = |spec: DeviceSpec, intent| async move {
            registry().open(&spec, Vec::new(), intent).await.unwrap()
        };
        let from = open(source.clone(), Intent::READ).await;
        let to = open(target.clone(), Intent::WRITE).await;
        let (source, target) = (Endpoint::Open(source, from), Endpoint::Open(target, to));
        let mut request = CopyRequest::new(source, target);
        request.options.range = Some((4096, 8192));
        request.open(&registry()).await.unwrap().run(Pool::new(64 << 20)).await.unwrap();
    });
    let copied = fs::read(lab.path("target")).unwrap();
    let (old, new) = (contents(2), contents(1));
    assert!(copied[..4096] == old[..4096] && copied[12288..] == old[12288..]);
    assert!(copied[4096..12288] == new[4096..12288]);
}

#[test]
fn fields_that_do_not_go_together_are_named() {
    let lab = Lab::new();
    for (options, fields) in [
        (&[NamedOption::flag("restart")][..], ["restart", "journal"]),
        (&[NamedOption::flag("trust")], ["trust", "destination-is-zero"]),
        (&[NamedOption::new("journal-interval", "1s")], ["journal-interval", "journal"]),
        (&[NamedOption::new("range", "0:1"), NamedOption::new("since", "m")], ["range", "since"]),
        (
            &[NamedOption::new("journal", "j"), NamedOption::new("manifest", "./j")],
            ["journal", "manifest"],
        ),
        (
            &[NamedOption::flag("verify"), NamedOption::flag("discard-source")],
            ["verify", "discard-source"],
        ),
    ] {
        let options = TransferOptions::from_named(options).unwrap();
        let request = CopyRequest { options, ..lab.request() };
        assert_eq!(request.check().unwrap_err().fields, fields);
        let error = lab.refused(request);
        assert_eq!(
            (error.kind(), error.step()),
            (TransferErrorKind::Request, TransferStep::Options)
        );
    }
    assert!(!lab.path("target").exists());
}

#[test]
fn what_is_refused_leaves_the_target_as_it_was() {
    let lab = Lab::new();
    fs::write(lab.path("target"), "old").unwrap();
    let absent = Endpoint::Device(DeviceSpec::Path(lab.path("absent")));
    let error = lab.refused(CopyRequest { source: absent, ..lab.request() });
    assert_eq!((error.kind(), error.side()), (TransferErrorKind::Open, Some(Side::Source)));
    assert_eq!((error.step(), error.remedy()), (TransferStep::OpenSource, "; check the name"));
    let generated = Endpoint::Device(DeviceSpec::parse("pattern:1M".as_ref()).unwrap());
    let error = lab.refused(CopyRequest { target: generated, ..lab.request() });
    assert_eq!((error.step(), error.side()), (TransferStep::OpenTarget, Some(Side::Target)));
    let mut request = lab.request();
    request.options.range = Some((0, 2 * SIZE as u64));
    let error = lab.refused(request);
    assert_eq!((error.kind(), error.step()), (TransferErrorKind::Open, TransferStep::CheckSides));
    let mut request = lab.request();
    request.options.manifest = Some(lab.path("source"));
    assert_eq!(lab.refused(request).step(), TransferStep::Manifest);
    assert!(!is_changed(&lab.path("target")));
}

#[test]
fn an_open_copy_has_changed_nothing_and_a_cancelled_one_says_so() {
    let lab = Lab::new();
    fs::write(lab.path("target"), "old").unwrap();
    let request = lab.request();
    let (state, error) = lab.runtime.block_on(move || async move {
        request.open(&registry()).await.unwrap().close().await;
        let setup = CopySetup::new(request_again(), registry()).unwrap();
        let control = setup.control();
        let source = setup.open_source().await.unwrap();
        control.progress().cancel();
        (control.target_state(), source.open_target().await.err().unwrap())
    });
    assert_eq!((state, error.kind()), (TargetState::Unchanged, TransferErrorKind::Other));
    assert!(!is_changed(&lab.path("target")));
}

/// A copy of nothing.
fn request_again() -> CopyRequest {
    let [source, target] =
        ["zero:1M", "memory:1M"].map(|text| DeviceSpec::parse(text.as_ref()).unwrap());
    CopyRequest::new(Endpoint::Device(source), Endpoint::Device(target))
}
