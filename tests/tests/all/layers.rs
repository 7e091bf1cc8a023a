//! Layers next to the filters of nbdkit that do the same, over the same file: clients see the same
//! facts, bytes, extents and errors. And the layers that decide about clients, with real clients.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use blockhaul_testkit::require_peer;
use blockhaul_testkit::tools::{PeerProgram, PeerServer, ScratchDir, is_running, until};
use blockhaul_tests::{LIMIT, bounded, done, lossy, serve, text};

/// What a client of libnbd does and sees.
const SCRIPT: &str = r#"
import hashlib, errno
def attempt(name, call):
    try:
        call()
        print(name, "ok")
    except nbd.Error as error:
        print(name, error.errno)
def look():
    size, digest, at = h.get_size(), hashlib.sha256(), 0
    while at < size:
        n = min(65536, size - at)
        digest.update(h.pread(n, at))
        at += n
    print(size, digest.hexdigest())
    runs, at = [], 0
    while at < size:
        found = []
        def extent(context, offset, entries, error):
            if not found:
                found.extend(entries)
        h.block_status(size - at, at, extent)
        for n, state in zip(found[0::2], found[1::2]):
            n = min(n, size - at)
            if n == 0:
                continue
            if runs and runs[-1][1] == state:
                runs[-1][0] += n
            else:
                runs.append([n, state])
            at += n
    print(runs)
print("read-only", h.is_read_only(), "zero", h.can_zero(), "fua", h.can_fua(), "cache", h.can_cache())
print("blocks", [h.get_block_size(s) for s in (nbd.SIZE_MINIMUM, nbd.SIZE_PREFERRED, nbd.SIZE_MAXIMUM)] if BLOCKS else "")
look()
h.set_strict_mode(0)
attempt("write", lambda: h.pwrite(b"x" * 4096, 8192))
if ODD:
    attempt("odd write", lambda: h.pwrite(b"y" * 1001, 20001))
if h.can_zero():
    attempt("zero", lambda: h.zero(65536, 65536))
    if ODD:
        attempt("odd zero", lambda: h.zero(999, 131073))
attempt("trim", lambda: h.trim(65536, 196608))
attempt("flush", lambda: h.flush())
attempt("same", lambda: h.pwrite(h.pread(512, 1024), 1024))
attempt("beyond", lambda: h.pread(512, h.get_size()))
look()
"#;

/// A file of 1 MiB with data and holes.
fn image(path: &Path) {
    let file = fs::File::create(path).unwrap();
    file.set_len(1 << 20).unwrap();
    for (index, at) in [0_u64, 65536, 200_000, 600_000, (1 << 20) - 5000].into_iter().enumerate() {
        let bytes: Vec<u8> = (0..5000_u32).map(|byte| (byte * 7 + index as u32) as u8).collect();
        file.write_all_at(&bytes, at).unwrap();
    }
}

/// What is compared.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Look {
    /// Everything but block sizes, which nbdkit tells only if a filter does.
    All,
    /// Block sizes too.
    Blocks,
    /// Only whole words are written: nbdkit refuses others where blockhaul reads, changes and writes.
    Words,
}

/// What libnbd's shell prints.
fn seen(nbdsh: &PeerProgram, server: &PeerServer, look: Look) -> String {
    let mut command = nbdsh.command();
    let truth = |said| if said { "True" } else { "False" };
    let blocks = truth(look == Look::Blocks);
    let odd = truth(look != Look::Words);
    let preamble = format!("BLOCKS, ODD = {blocks}, {odd}");
    command.args(["--base-allocation", "-u", &server.uri(""), "-c", &preamble, "-c", SCRIPT]);
    done(&mut command)
}

/// The same layers, ours and nbdkit's, over a file each.
fn same(layers: &[&str], filters: &[&str], prepare: fn(&Path), look: Look) {
    let nbdkit = require_peer!("nbdkit");
    let nbdsh = require_peer!("nbdsh");
    let scratch = ScratchDir::on_disk().unwrap();
    let ours = scratch.file("ours.img");
    let theirs = scratch.file("theirs.img");
    prepare(&ours);
    prepare(&theirs);
    let mut args: Vec<&str> = layers.iter().flat_map(|layer| ["--layer", layer]).collect();
    args.push(text(&ours));
    let our_server = serve(&scratch, "ours", &args);
    let file = format!("file={}", text(&theirs));
    let split = filters.iter().position(|word| !word.starts_with("--")).unwrap_or(filters.len());
    let mut args = filters[..split].to_vec();
    args.extend(["file", &file]);
    args.extend(&filters[split..]);
    let their_server = PeerServer::nbdkit(&nbdkit, &scratch.socket("theirs"), &args).unwrap();
    let ours_seen = seen(&nbdsh, &our_server, look);
    let theirs_seen = seen(&nbdsh, &their_server, look);
    assert_eq!(ours_seen, theirs_seen, "{layers:?} (left) and {filters:?} differ");
    assert!(fs::read(ours).unwrap() == fs::read(theirs).unwrap(), "{layers:?}: the files differ");
}

#[test]
fn offset() {
    let filters = ["--filter=offset", "offset=8192", "range=524288"];
    same(&["offset?offset=8192&range=524288"], &filters, image, Look::All);
}

#[test]
fn truncate() {
    let filters = ["--filter=truncate", "truncate=700001", "round-up=4096"];
    same(&["truncate?truncate=700001&round-up=4096"], &filters, image, Look::All);
}

#[test]
fn nozero() {
    same(&["nozero"], &["--filter=nozero"], image, Look::All);
    let filters = ["--filter=nozero", "zeromode=emulate"];
    same(&["nozero?zeromode=emulate"], &filters, image, Look::All);
    let filters = ["--filter=nozero", "zeromode=notrim"];
    same(&["nozero?zeromode=notrim"], &filters, image, Look::All);
}

#[test]
fn fua_and_nocache() {
    let filters = ["--filter=nocache", "--filter=fua"];
    same(&["fua", "nocache"], &filters, image, Look::All);
    let filters = ["--filter=nocache", "--filter=fua", "fuamode=force", "cachemode=nop"];
    same(&["fua?fuamode=force", "nocache?cachemode=nop"], &filters, image, Look::All);
}

#[test]
fn noextents_and_readonly() {
    let filters = ["--filter=noextents", "--filter=readonly"];
    same(&["readonly", "noextents"], &filters, image, Look::All);
}

#[test]
fn swab() {
    same(&["swab?swab-bits=32"], &["--filter=swab", "swab-bits=32"], image, Look::Words);
}

#[test]
fn blocksize() {
    let filters = ["--filter=blocksize", "minblock=512", "maxdata=8192", "maxlen=65536"];
    same(&["blocksize?minblock=512&maxdata=8192&maxlen=65536"], &filters, image, Look::All);
    let filters = [
        "--filter=blocksize-policy",
        "blocksize-minimum=4096",
        "blocksize-preferred=65536",
        "blocksize-maximum=1M",
        "blocksize-error-policy=error",
    ];
    let layer = "blocksize?minimum=4096&preferred=65536&maximum=1M&error-policy=error";
    same(&[layer], &filters, image, Look::Blocks);
}

#[test]
fn protect() {
    let filters = ["--filter=protect", "protect=1000-1999"];
    same(&["protect?protect=1000-1999"], &filters, image, Look::All);
}

#[test]
fn cow() {
    // nbdkit's overlay cannot be zeroed, and ours can: neither is advertised.
    same(&["cow", "nozero"], &["--filter=nozero", "--filter=cow"], image, Look::All);
}

#[test]
fn checkwrite() {
    same(&["checkwrite"], &["--filter=checkwrite"], image, Look::All);
}

#[test]
fn extentlist() {
    let scratch = ScratchDir::new().unwrap();
    let list = scratch.file("list");
    fs::write(&list, "0 8192\n8192 4096 zero\n200000 5000\n300000 100 hole\n").unwrap();
    let layer = format!("extentlist?extentlist={}", text(&list));
    let filter = format!("extentlist={}", text(&list));
    same(&[&layer], &["--filter=extentlist", &filter], image, Look::All);
}

/// A disk with an MBR: a primary and a logical partition.
fn partitioned(path: &Path) {
    image(path);
    let file = fs::File::options().write(true).open(path).unwrap();
    let entry = |kind: u8, start: u32, sectors: u32| {
        let mut entry = vec![0, 0, 0, 0, kind, 0, 0, 0];
        entry.extend(start.to_le_bytes());
        entry.extend(sectors.to_le_bytes());
        entry
    };
    let table = [entry(0x83, 64, 1000), entry(0x05, 1100, 900)].concat();
    file.write_all_at(&table, 446).unwrap();
    file.write_all_at(&[0x55, 0xaa], 510).unwrap();
    file.write_all_at(&entry(0x83, 4, 800), 1100 * 512 + 446).unwrap();
    file.write_all_at(&[0x55, 0xaa], 1100 * 512 + 510).unwrap();
}

#[test]
fn partition() {
    for number in ["1", "5"] {
        let layer = format!("partition?partition={number}");
        let filter = format!("partition={number}");
        same(&[&layer], &["--filter=partition", &filter], partitioned, Look::All);
    }
}

/// Whether a client gets in: what nbdinfo says about the size.
fn size(nbdinfo: &PeerProgram, server: &PeerServer, export: &str) -> Result<String, String> {
    let mut command = nbdinfo.command();
    command.args(["--size", &server.uri(export)]);
    let output = bounded(&mut command, LIMIT);
    if output.status.success() {
        Ok(lossy(&output.stdout).trim().to_string())
    } else {
        Err(lossy(&output.stderr))
    }
}

/// Waits until a server has ended by itself.
#[track_caller]
fn ends(server: &PeerServer, why: &str) {
    until(&format!("it ends: {why}"), || !is_running(&server.pid().to_string()));
}

#[test]
fn clients_are_let_in_counted_and_kept_out() {
    let nbdinfo = require_peer!("nbdinfo");
    let nbdsh = require_peer!("nbdsh");
    let scratch = ScratchDir::new().unwrap();
    let denied = serve(&scratch, "denied", &["--layer", "ip?deny=anyunix", "memory:1M"]);
    size(&nbdinfo, &denied, "").unwrap_err();
    let uid = rustix::process::getuid().as_raw();
    let layer = format!("ip?allow=uid:{uid}&deny=all");
    let allowed = serve(&scratch, "allowed", &["--layer", &layer, "memory:1M"]);
    assert_eq!(size(&nbdinfo, &allowed, "").unwrap(), "1048576");

    let limited = serve(&scratch, "limited", &["--layer", "limit?limit=2", "memory:1M"]);
    let script = format!(
        "
a = [nbd.NBD() for _ in range(2)]
for h in a: h.connect_uri({uri:?})
try:
    nbd.NBD().connect_uri({uri:?})
    print('a third came in')
except nbd.Error:
    print('full')
a[0].shutdown()
for _ in range(1000):
    try:
        nbd.NBD().connect_uri({uri:?})
        print('room again')
        break
    except nbd.Error:
        import time; time.sleep(0.05)
",
        uri = limited.uri("")
    );
    assert_eq!(done(nbdsh.command().args(["-c", &script])), "full\nroom again\n");
}

#[test]
fn export_names_are_changed_and_checked() {
    let nbdinfo = require_peer!("nbdinfo");
    let scratch = ScratchDir::new().unwrap();
    let layer = "exportname?default-export=disk&exportname=disk&exportname-strict=on&\
                 exportname-list=explicit&exportdesc=fixed:a disk";
    let server = serve(&scratch, "s", &["--export", "disk", "--layer", layer, "memory:1M"]);
    assert_eq!(size(&nbdinfo, &server, "disk").unwrap(), "1048576");
    assert_eq!(size(&nbdinfo, &server, "").unwrap(), "1048576");
    size(&nbdinfo, &server, "other").unwrap_err();
    let mut command = nbdinfo.command();
    let listed = done(command.args(["--list", "--json", &server.uri("")]));
    assert!(listed.contains("\"export-name\": \"disk\"") && listed.contains("a disk"), "{listed}");
    // Without TLS there is a message, whatever the name.
    let layer = "tls-fallback?tlsreadme=come back with TLS";
    let server = serve(&scratch, "t", &["--layer", layer, "memory:1M"]);
    assert_eq!(size(&nbdinfo, &server, "anything").unwrap(), "512");
    let nbdsh = require_peer!("nbdsh");
    let mut command = nbdsh.command();
    command.args(["-u", &server.uri(""), "-c", "print(h.pread(18, 0), h.is_read_only())"]);
    assert_eq!(done(&mut command), "bytearray(b'come back with TLS') True\n");
}

#[test]
fn servers_end_when_told_to() {
    let nbdinfo = require_peer!("nbdinfo");
    let scratch = ScratchDir::new().unwrap();
    let last = serve(&scratch, "last", &["--layer", "exitlast", "memory:1M"]);
    size(&nbdinfo, &last, "").unwrap();
    ends(&last, "the last client has left");

    let event = scratch.file("event");
    let layer = format!("exitwhen?exit-when-file-created={}&exit-when-poll=20ms", text(&event));
    let server = serve(&scratch, "when", &["--layer", &layer, "memory:1M"]);
    size(&nbdinfo, &server, "").unwrap();
    fs::write(&event, "").unwrap();
    ends(&server, "the file is there");
}
