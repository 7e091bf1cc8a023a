//! Copies that discard their source, where source and target are one storage, or one of them becomes another.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{Device, Facts, Kind, OpKind, Pending, Reply, Request};
use blockhaul_catalog::Stack;
use blockhaul_engine::{CopyError, JournalOptions, Options, Progress, Side, Summary, copy};
use blockhaul_io::{Config, Engine, Pool, Reservation, Runtime, is_zero};
use blockhaul_testkit::model::{Completion, Model, ModelDevice, Trim};
use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::Scratch;

const SIZE: usize = 1 << 20;

fn on_worker<F: Future<Output = ()> + 'static>(check: impl FnOnce() -> F + Send + 'static) {
    Runtime::start(&Config { workers: 2, engine: Engine::Auto }).unwrap().block_on(check);
}

fn options(journal: Option<&Path>) -> Options {
    let journal = journal.map(|path| JournalOptions {
        path: path.into(),
        restart: false,
        keep: false,
        interval: Duration::ZERO,
        source: "source".into(),
        target: "target".into(),
    });
    Options {
        discard_source: true,
        segment: 64 << 10,
        request_size: 16 << 10,
        connections: 1,
        retries: 0,
        journal,
        ..Options::default()
    }
}

async fn run(
    from: &Arc<impl Device + 'static>,
    to: &Arc<impl Device + 'static>,
    options: &Options,
) -> Result<Summary, CopyError> {
    let [from, to] = [Stack::over(from.clone()), Stack::over(to.clone())];
    copy(&from, &to, options, &Pool::new(8 << 20), &Arc::new(Progress::new())).await
}

fn bytes() -> Vec<u8> {
    let mut bytes = vec![0; SIZE];
    Rng::new(seed()).fill(&mut bytes[3 * 4096..]);
    bytes
}

fn disk(bytes: &[u8]) -> Arc<ModelDevice> {
    let model = Model::new(SIZE as u64).with_content(bytes.to_vec()).with_trim(Trim::Zeroes);
    ModelDevice::new(model, Completion::Deferred)
}

/// How a disk is seen at another address.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    /// As it is.
    Same,
    /// Each byte is another one.
    Inverted,
    /// Blocks that were read once are not read again.
    Cached,
}

struct View {
    disk: Arc<ModelDevice>,
    form: Form,
    cache: Arc<Mutex<BTreeMap<u64, Vec<u8>>>>,
}

impl Device for View {
    fn facts(&self) -> Arc<Facts> {
        self.disk.facts()
    }

    fn submit(&self, request: Request) -> Pending {
        if request.kind() != OpKind::Read || self.form == Form::Same {
            return self.disk.submit(request);
        }
        let (at, form, cache) = (request.at, self.form, self.cache.clone());
        let len = request.len as usize;
        let reply = self.disk.submit(request);
        Pending::start(async move {
            let mut bytes = match reply.await? {
                Reply::Data(data) => data.bytes().to_vec(),
                _ => vec![0; len],
            };
            if form == Form::Inverted {
                bytes.iter_mut().for_each(|byte| *byte ^= 0xff);
            }
            for (block, at) in bytes.chunks_mut(4096).zip((at..).step_by(4096)) {
                if form == Form::Cached {
                    let mut cache = cache.lock().unwrap();
                    block.copy_from_slice(cache.entry(at).or_insert_with(|| block.to_vec()));
                }
            }
            let mut buf = Reservation::unpooled(len).into_buf();
            buf.copy_from_slice(&bytes);
            Ok(Reply::Data(buf.into()))
        })
    }
}

#[test]
fn one_storage_is_recognized_in_another_form_and_behind_a_cache() {
    on_worker(|| async {
        let scratch = Scratch::new().unwrap();
        let path = scratch.file("journal");
        let bytes = bytes();
        for form in [Form::Same, Form::Inverted, Form::Cached] {
            for journal in [Some(&*path), None] {
                let target = disk(&bytes);
                for _ in 0..2 {
                    let cache = Arc::default();
                    let source = Arc::new(View { disk: target.clone(), form, cache });
                    let error = run(&source, &target, &options(journal)).await.unwrap_err();
                    assert_eq!((error.kind(), error.side), (Kind::Invalid, Some(Side::Target)));
                    assert!(error.to_string().contains("one storage"), "{form:?}: {error}");
                    assert!(!path.exists() && target.bytes() == bytes, "{form:?}");
                }
                assert!(target.seen().iter().all(|seen| seen.kind != OpKind::Trim), "{form:?}");
            }
        }
    });
}

/// A disk that is replaced by another one after some writes of data, without an error.
struct Replaced {
    disks: [Arc<ModelDevice>; 2],
    left: AtomicU64,
}

impl Device for Replaced {
    fn facts(&self) -> Arc<Facts> {
        self.disks[0].facts()
    }

    fn submit(&self, request: Request) -> Pending {
        let counts = request.len == 16 << 10;
        let left = self.left.load(Ordering::SeqCst);
        if left > 0 && counts {
            self.left.fetch_sub(1, Ordering::SeqCst);
        }
        self.disks[usize::from(left == 0)].submit(request)
    }
}

/// What the source lacks is on the target that the copy began with.
#[track_caller]
fn nothing_is_lost(source: &ModelDevice, target: &ModelDevice, bytes: &[u8]) {
    let (left, there) = (source.bytes(), target.bytes());
    for at in (0..SIZE).step_by(4096) {
        let block = at..at + 4096;
        assert!(
            left[block.clone()] == bytes[block.clone()] || there[block.clone()] == bytes[block],
            "lost at {at}"
        );
    }
}

#[test]
fn a_side_that_becomes_another_disk_without_an_error_ends_the_copy() {
    on_worker(|| async {
        let scratch = Scratch::new().unwrap();
        let path = scratch.file("journal");
        let bytes = bytes();
        let blank = vec![0; SIZE];
        for left in (1..44).step_by(3) {
            for journal in [Some(&*path), None] {
                let _ = std::fs::remove_file(&path);
                let mut options = options(journal);
                // One batch: no write is under way between its check and its marker.
                if let Some(journal) = &mut options.journal {
                    journal.interval = Duration::from_secs(60);
                }
                let source = disk(&bytes);
                let disks = [disk(&blank), disk(&blank)];
                let target = Arc::new(Replaced { disks, left: left.into() });
                let error = run(&source, &target, &options)
                    .await
                    .expect_err(&format!("{left} {journal:?}"));
                assert_eq!(error.side, Some(Side::Target), "{left}: {error}");
                assert!(error.to_string().contains("is it another disk?"), "{left}: {error}");
                nothing_is_lost(&source, &target.disks[0], &bytes);
                let _ = std::fs::remove_file(&path);
                let disks = [disk(&bytes), disk(&blank)];
                let source = Arc::new(Replaced { disks, left: left.into() });
                let target = disk(&blank);
                let error = run(&source, &target, &options).await.unwrap_err();
                assert_eq!(error.side, Some(Side::Source), "{left}: {error}");
                nothing_is_lost(&source.disks[0], &target, &bytes);
                assert!(is_zero(&source.disks[1].bytes()));
            }
        }
    });
}
