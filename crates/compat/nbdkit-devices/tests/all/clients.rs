//! Devices that are separate for each client: `info:`, `tmpdisk:`, `ondemand:`.

use std::ffi::OsStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use blockhaul_block::{Can, Device, DeviceExt, Kind};
use blockhaul_catalog::{Client, Exports, Intent, Registry, Spec, Visit};
use blockhaul_io::{Config, Data, Runtime};
use blockhaul_testkit::tools::Scratch;

async fn exports(spec: &str) -> blockhaul_block::Result<Arc<dyn Exports>> {
    let registry = Registry { backends: crate::backends(), ..Registry::default() };
    let spec = Spec::parse(OsStr::new(spec))?;
    Ok(registry.exports(&spec, &[], Intent::WRITE).await?.expect("a device for each client"))
}

async fn visit(exports: &Arc<dyn Exports>) -> Arc<dyn Visit> {
    exports.admit(Client::default()).await.unwrap()
}

fn run<T: Send + 'static, F: Future<Output = T> + 'static>(
    job: impl FnOnce() -> F + Send + 'static,
) -> T {
    Runtime::start(&Config { workers: 1, ..Config::default() }).unwrap().block_on(job)
}

async fn bytes(device: &Arc<dyn Device>) -> Vec<u8> {
    match device.facts().size as usize {
        0 => Vec::new(),
        size => device.read(0, size).await.unwrap().bytes().to_vec(),
    }
}

/// A time in the format of `info:`.
async fn time(device: &Arc<dyn Device>) -> Duration {
    let told = bytes(device).await;
    assert_eq!(told.len(), 12);
    let seconds = u64::from_be_bytes(told[..8].try_into().unwrap());
    Duration::new(seconds, u32::from_be_bytes(told[8..].try_into().unwrap()) * 1000)
}

#[test]
fn a_client_learns_about_itself() {
    run(|| async {
        let names = exports("info:").await.unwrap();
        for name in ["", "a", "/", "テスト", "\n", &"x".repeat(4096)] {
            let device = visit(&names).await.open(name, false).await.unwrap().unwrap().device;
            assert_eq!(bytes(&device).await, name.as_bytes());
            assert!(!device.facts().can.intersects(Can::CHANGES));
        }
        let names = exports("info:Base64exportname").await.unwrap();
        let device = visit(&names).await.open("aGVsbG8=", false).await.unwrap().unwrap().device;
        assert_eq!(bytes(&device).await, b"hello");
        assert!(visit(&names).await.open("xyz", false).await.is_err());

        let clock = exports("info:time").await.unwrap();
        let clock = visit(&clock).await.open("", false).await.unwrap().unwrap().device;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        assert!(time(&clock).await.abs_diff(now) < Duration::from_secs(60));
        let part = clock.read(3, 5).await.unwrap();
        assert_eq!(part.bytes(), &bytes(&clock).await[3..8]);
        assert!(!clock.facts().can.contains(Can::MULTI_CONN));

        let uptime = exports("info:uptime").await.unwrap();
        let uptime = visit(&uptime).await.open("", false).await.unwrap().unwrap().device;
        blockhaul_io::sleep(Duration::from_millis(20)).await;
        let connected = exports("info:conntime").await.unwrap();
        let connected = visit(&connected).await.open("", false).await.unwrap().unwrap().device;
        let first = time(&connected).await;
        let second = time(&connected).await;
        assert!(first <= second && second < time(&uptime).await);
        let error = exports("info:what").await.err().unwrap();
        assert!(error.to_string().contains("known are exportname"), "{error}");
    });
}

#[test]
fn every_client_has_a_disk_of_its_own_and_nothing_stays() {
    blockhaul_testkit::require_peer!("mkfs.ext4");
    let scratch = Scratch::new().unwrap();
    let where_it_was = scratch.file("where");
    let script = format!("truncate -s $((size + 5)) $disk; printf %s \"$disk$x\" > {}", {
        where_it_was.display()
    });
    let script: String = script.bytes().map(|byte| format!("%{byte:02x}")).collect();
    run(move || async move {
        let disks = exports("tmpdisk:8M?label=hello").await.unwrap();
        let one = visit(&disks).await.open("", false).await.unwrap().unwrap().device;
        let other = visit(&disks).await.open("any", false).await.unwrap().unwrap().device;
        for disk in [&one, &other] {
            assert_eq!(disk.facts().size, 8 << 20);
            assert!(!disk.facts().can.contains(Can::MULTI_CONN));
            let block = disk.read(1024, 1024).await.unwrap();
            assert_eq!(&block.bytes()[56..58], [0x53, 0xef], "the magic number of ext4");
            assert_eq!(&block.bytes()[120..126], b"hello\0");
        }
        one.write(0, Data::copy_of(b"mine")).await.unwrap();
        one.flush().await.unwrap();
        assert_eq!(other.read(0, 4).await.unwrap().bytes(), [0; 4]);

        let disks = exports(&format!("tmpdisk:1000?command={script}&x=y")).await.unwrap();
        let disk = visit(&disks).await.open("", false).await.unwrap().unwrap().device;
        assert_eq!(disk.facts().size, 1005);
        let path = std::fs::read_to_string(&where_it_was).unwrap();
        assert!(path.ends_with("/disky"), "{path}");
        let folder = std::path::Path::new(&path).parent().unwrap();
        assert!(folder.parent().unwrap().is_dir() && !folder.exists(), "{path}");

        let failing = exports("tmpdisk:1M?command=exit 3").await.unwrap();
        let error = visit(&failing).await.open("", false).await.err().unwrap();
        assert!(error.to_string().contains("exit status: 3"), "{error}");
        for (bad, part) in [
            ("tmpdisk:", "tmpdisk:SIZE"),
            ("tmpdisk:1M?x=y", "require command="),
            ("tmpdisk:1M?command=true&disk=y", "name of a variable"),
            ("tmpdisk:1M?command=true&a-b=y", "name of a variable"),
        ] {
            let error = exports(bad).await.err().unwrap();
            assert_eq!(error.kind(), Kind::Usage);
            assert!(error.to_string().contains(part), "{bad}: {error}");
        }
    });
}

#[test]
fn disks_are_made_when_they_are_asked_for() {
    blockhaul_testkit::require_peer!("mkfs.ext4");
    let scratch = Scratch::new().unwrap();
    let folder = scratch.path().to_path_buf();
    run(move || async move {
        std::fs::write(folder.join(".hidden"), "x").unwrap();
        let spec = format!("ondemand:{}?size=8M", folder.display());
        let disks = exports(&spec).await.unwrap();
        let first = visit(&disks).await.open("", false).await.unwrap().unwrap();
        assert_eq!(first.name, "default");
        let first = first.device;
        let named = visit(&disks).await.open("a", false).await.unwrap().unwrap().device;
        assert_eq!(named.read(1080, 2).await.unwrap().bytes(), [0x53, 0xef]);
        named.write(0, Data::copy_of(b"kept")).await.unwrap();
        assert_eq!(std::fs::metadata(folder.join("default")).unwrap().len(), 8 << 20);
        let listed = visit(&disks).await.list(false).await.unwrap();
        let listed: Vec<_> = listed.into_iter().map(|one| one.name).collect();
        assert_eq!(listed, ["", "a"]);

        // One client at a time.
        let error = visit(&disks).await.open("a", false).await.err().unwrap();
        assert!(error.to_string().contains("another client"), "{error}");
        // These are other exports, which do not write to a file that is open here.
        drop(named);
        let shared = exports(&format!("{spec}&share=on")).await.unwrap();
        let second = visit(&shared).await.open("a", false).await.unwrap().unwrap().device;
        assert_eq!(second.read(0, 4).await.unwrap().bytes(), b"kept");
        let waiting = exports(&format!("{spec}&wait=on")).await.unwrap();
        let waiting = visit(&waiting).await.open("default", false);
        let waiting = blockhaul_io::spawn(waiting);
        blockhaul_io::sleep(Duration::from_millis(30)).await;
        drop(first);
        assert_eq!(waiting.await.unwrap().unwrap().device.facts().size, 8 << 20);

        let bad = [".", "..", ".hidden", "/", "a/b", "../x", "a\0", &"x".repeat(256)];
        for name in bad {
            let error = visit(&disks).await.open(name, false).await.err();
            assert_eq!(error.map(|error| error.kind()), Some(Kind::NotFound), "{name:?}");
        }

        // A failed disk is not left behind.
        let failing = format!("{spec}&command=touch %24disk; exit 1");
        let failing = exports(&failing).await.unwrap();
        assert!(visit(&failing).await.open("b", false).await.is_err());
        assert!(!folder.join("b").exists());
        for (bad, part) in [
            ("ondemand:?size=1M".to_string(), "no directory"),
            (format!("ondemand:{}", folder.display()), "no size"),
            ("ondemand:/no/such?size=1M".to_string(), "/no/such"),
        ] {
            let error = exports(&bad).await.err().unwrap();
            assert!(error.to_string().contains(part), "{bad}: {error}");
        }
    });
}
