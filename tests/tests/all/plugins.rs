//! nbdkit's plugins, unmodified, as Debian compiles them, in `blockhaul serve`: every one that can do
//! something without a service far away serves a client of libnbd's. The program runs among the peers,
//! for whose libraries the plugins were linked.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::hosted::{blockhaul, contents, has, root, serve_and_run, serving, write_and_read};
use blockhaul_testkit::tools::{ScratchDir, SkipReason, skip_or_fail};
use blockhaul_tests::{assert_same, done, lossy, text};

/// Copies a plugin's disk into a file.
#[track_caller]
fn read(plugin: &str, scratch: &ScratchDir) -> PathBuf {
    let out = scratch.file("out");
    serving(plugin, &[], &format!("nbdcopy \"$uri\" {}", text(&out)));
    out
}

/// A test that needs a plugin.
macro_rules! with_plugin {
    ($test:ident, $plugin:literal, |$scratch:ident| $body:block) => {
        #[test]
        fn $test() {
            if has($plugin) {
                let $scratch = ScratchDir::new().unwrap();
                $body
            }
        }
    };
}

with_plugin!(file_is_read_and_written, "file", |scratch| {
    let disk = scratch.file("disk");
    fs::File::create(&disk).unwrap().set_len(3 << 20).unwrap();
    write_and_read(&format!("file?{}", text(&disk)), 3 << 20, &scratch);
    assert_same(&disk, &scratch.file("in"), "the file behind the plugin");
});

with_plugin!(file_serves_a_folder_by_names, "file", |scratch| {
    fs::create_dir(scratch.file("d")).unwrap();
    contents(&scratch.file("d/one"), 4096);
    let two = contents(&scratch.file("d/two"), 8192);
    let plugin = format!("file?dir={}", text(&scratch.file("d")));
    let out = scratch.file("out");
    let said = serving(
        &plugin,
        &["--export", "two"],
        &format!(
            "nbdcopy \"$uri\" {}; nbdinfo --list \"nbd+unix:///?socket=$unixsocket\"",
            text(&out)
        ),
    );
    assert_same(&two, &out, "an export by its name");
    assert!(said.contains("export=\"one\"") && said.contains("export=\"two\""), "{said}");
    let output = serve_and_run(&plugin, &["--export", "three"], "nbdinfo \"$uri\"");
    assert!(!output.status.success());
    // The plugin's own words reach the client.
    let heard = lossy(&output.stderr);
    assert!(heard.contains("nbdinfo") && heard.contains("three"), "{heard}");
});

with_plugin!(memory_is_read_and_written, "memory", |scratch| {
    write_and_read("memory?5M", 5 << 20, &scratch);
});

with_plugin!(memory_tells_extents_and_zeroes, "memory", |scratch| {
    contents(&scratch.file("in"), 1 << 20);
    let script = format!(
        "nbdcopy {} \"$uri\"; \
         nbdsh -u \"$uri\" -c 'h.zero(65536, 65536)' -c 'h.trim(65536, 524288)' -c 'h.flush()'; \
         nbdinfo --map \"$uri\"",
        text(&scratch.file("in"))
    );
    let said = serving("memory?4M", &[], &script);
    let runs: Vec<_> =
        said.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
    assert_eq!(runs[0][..3], ["0", "65536", "0"], "{said}");
    assert_eq!(runs[1][..3], ["65536", "65536", "3"], "{said}");
});

with_plugin!(pattern_is_the_same_as_ours, "pattern", |scratch| {
    let out = read("pattern?size=2M", &scratch);
    let args = ["compare", "pattern:2M", text(&out)];
    done(&mut blockhaul(&args));
});

with_plugin!(data_is_what_was_typed, "data", |scratch| {
    let out = read("data?data=0x12%20@512%20%2234%22*3&size=1024", &scratch);
    let bytes = fs::read(out).unwrap();
    assert_eq!((bytes.len(), bytes[0]), (1024, 0x12));
    assert_eq!(&bytes[512..520], b"343434\0\0");
});

with_plugin!(split_joins_files, "split", |scratch| {
    let one = contents(&scratch.file("1"), 1 << 20);
    let two = contents(&scratch.file("2"), 512 << 10);
    let out = read(&format!("split?file={}&file={}", text(&one), text(&two)), &scratch);
    let joined = [fs::read(one).unwrap(), fs::read(two).unwrap()].concat();
    assert!(joined == fs::read(out).unwrap());
});

with_plugin!(partitioning_puts_a_table_around_files, "partitioning", |scratch| {
    let one = contents(&scratch.file("1"), 1 << 20);
    let plugin = format!("partitioning?file={}&partition-type=gpt", text(&one));
    let out = read(&plugin, &scratch);
    let disk = fs::read(&out).unwrap();
    let wanted = fs::read(&one).unwrap();
    assert!(disk[512..].starts_with(b"EFI PART"));
    assert!(disk[1 << 20..].starts_with(&wanted));
});

with_plugin!(floppy_is_a_fat_disk, "floppy", |scratch| {
    fs::create_dir(scratch.file("d")).unwrap();
    fs::write(scratch.file("d/HELLO.TXT"), "inside the floppy").unwrap();
    let out = read(&format!("floppy?dir={}&label=TESTDISK", text(&scratch.file("d"))), &scratch);
    let disk = fs::read(out).unwrap();
    let holds = |text: &[u8]| disk.windows(text.len()).any(|window| window == text);
    assert!(holds(b"FAT32") && holds(b"TESTDISK") && holds(b"inside the floppy"));
});

with_plugin!(iso_is_made_of_a_folder, "iso", |scratch| {
    fs::create_dir(scratch.file("d")).unwrap();
    fs::write(scratch.file("d/hello"), "inside the image").unwrap();
    let out = read(&format!("iso?dir={}", text(&scratch.file("d"))), &scratch);
    let disk = fs::read(out).unwrap();
    assert_eq!(&disk[0x8001..0x8006], b"CD001");
    assert!(disk.windows(16).any(|window| window == b"inside the image"));
});

with_plugin!(linuxdisk_is_a_disk_with_a_file_system, "linuxdisk", |scratch| {
    fs::create_dir(scratch.file("d")).unwrap();
    fs::write(scratch.file("d/hello"), "inside the disk").unwrap();
    let out = read(&format!("linuxdisk?dir={}&size=+8M", text(&scratch.file("d"))), &scratch);
    let disk = fs::read(out).unwrap();
    assert!(disk[512..].starts_with(b"EFI PART"));
    assert!(disk.windows(15).any(|window| window == b"inside the disk"));
});

with_plugin!(tmpdisk_makes_each_client_a_disk_of_its_own, "tmpdisk", |scratch| {
    let out = read("tmpdisk?size=8M&type=ext2", &scratch);
    let disk = fs::read(out).unwrap();
    assert_eq!((disk.len(), &disk[0x438..0x43a]), (8 << 20, &[0x53, 0xef][..]));
});

with_plugin!(ondemand_makes_a_disk_for_each_name, "ondemand", |scratch| {
    fs::create_dir(scratch.file("d")).unwrap();
    let plugin = format!("ondemand?dir={}&size=8M&type=ext2", text(&scratch.file("d")));
    let script = "nbdinfo --size \"$uri\"";
    let said = serving(&plugin, &["--export", "abc"], script);
    assert_eq!(said.lines().next(), Some("8388608"), "{said}");
    assert!(scratch.file("d/abc").is_file());
});

with_plugin!(curl_reads_local_files_and_http, "curl", |scratch| {
    let disk = contents(&scratch.file("disk"), 3 << 20);
    let out = read(&format!("curl?url=file://{}", text(&disk)), &scratch);
    assert_same(&disk, &out, "file:// through curl");
    fs::remove_file(&out).unwrap();
    let server = crate::http::Server::start(fs::read(&disk).unwrap());
    let out = read(&format!("curl?url=http://{}/disk", server.address), &scratch);
    assert_same(&disk, &out, "http:// through curl");
    assert!(server.most_connections() >= 1);
    let output =
        serve_and_run(&format!("curl?url=http://{}/none", server.address), &[], "nbdinfo \"$uri\"");
    assert!(lossy(&output.stderr).contains("404"), "{}", lossy(&output.stderr));
});

with_plugin!(nbd_passes_requests_on, "nbd", |scratch| {
    let socket = scratch.socket("s");
    let nbdkit = blockhaul_testkit::require_peer!("nbdkit");
    let server =
        blockhaul_testkit::tools::PeerServer::nbdkit(&nbdkit, &socket, &["memory", "2M"]).unwrap();
    write_and_read(&format!("nbd?socket={}", text(&socket)), 2 << 20, &scratch);
    drop(server);
});

/// A shell plugin with a disk in a file.
const SHELL: &str = r#"#!/bin/sh
case "$1" in
  get_size) stat -c %s "$DISK" ;;
  can_write|can_flush|can_trim) ;;
  can_zero) exit 3 ;;
  pread) dd if="$DISK" bs=4096 skip=$4 count=$3 iflag=skip_bytes,count_bytes status=none ;;
  pwrite) dd of="$DISK" conv=notrunc seek=$4 oflag=seek_bytes status=none ;;
  flush|trim) ;;
  *) exit 2 ;;
esac
"#;

with_plugin!(sh_runs_a_script, "sh", |scratch| {
    let disk = scratch.file("disk");
    fs::File::create(&disk).unwrap().set_len(256 << 10).unwrap();
    let script = scratch.file("script");
    fs::write(&script, SHELL.replace("$DISK", text(&disk))).unwrap();
    done(Command::new("chmod").arg("+x").arg(&script));
    write_and_read(&format!("sh?{}", text(&script)), 256 << 10, &scratch);
    assert_same(&disk, &scratch.file("in"), "the file behind the script");
});

with_plugin!(eval_runs_fragments_and_says_its_errors, "eval", |scratch| {
    let plugin =
        "eval?get_size=echo%204096&pread=echo%20ENOSPC%20the%20dog%20ate%20it%20>%262;%20exit%201";
    let output = serve_and_run(plugin, &[], "! nbdsh -u \"$uri\" -c 'h.pread(512, 0)' 2>&1");
    let said = lossy(&output.stdout);
    assert!(output.status.success(), "{}", lossy(&output.stderr));
    assert!(said.contains("the dog ate it") || said.contains("No space left"), "{said}");
    drop(scratch);
});

/// What an interpreter's plugin does: a disk of 1 MiB in a variable.
fn script(scratch: &ScratchDir, name: &str, source: &str) -> String {
    let path = scratch.file(name);
    fs::write(&path, source).unwrap();
    text(&path).to_string()
}

with_plugin!(python_is_hosted, "python", |scratch| {
    let source = "import nbdkit\nAPI_VERSION = 2\ndisk = bytearray(1024 * 1024)\n\
                  def open(readonly): return 1\n\
                  def get_size(h): return len(disk)\n\
                  def pread(h, buf, offset, flags): buf[:] = disk[offset:offset+len(buf)]\n\
                  def pwrite(h, buf, offset, flags): disk[offset:offset+len(buf)] = buf\n\
                  def zero(h, count, offset, flags): disk[offset:offset+count] = bytes(count)\n\
                  def flush(h, flags): pass\n";
    let path = script(&scratch, "disk.py", source);
    write_and_read(&format!("python?{path}"), 1 << 20, &scratch);
    let source = source.replace("buf[:] = disk", "raise RuntimeError('the snake bites')\n  #");
    let path = script(&scratch, "bad.py", &source.replace("flags): raise", "flags):\n  raise"));
    let output =
        serve_and_run(&format!("python?{path}"), &[], "! nbdsh -u \"$uri\" -c 'h.pread(512, 0)'");
    assert!(output.status.success(), "{}", lossy(&output.stderr));
});

// Its reads and writes are direct: they begin on a page wherever they come from, zeroes too.
with_plugin!(the_python_of_the_manual_is_read_and_written, "python", |scratch| {
    let manual = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/plugins-python.md");
    let manual = fs::read_to_string(manual).unwrap();
    let source = manual.split("```python\n").nth(1).unwrap().split("```").next().unwrap();
    assert!(source.lines().count() <= 50, "it says so");
    let module = script(&scratch, "direct.py", source);
    let disk = scratch.file("disk");
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let plugin = format!("python?{module}&file={}", text(&disk));
    write_and_read(&plugin, 1 << 20, &scratch);
    assert_same(&disk, &scratch.file("in"), "the file behind the module");
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    // Many at a time, so that some come in one piece.
    let client = "import nbd, os\nh = nbd.NBD()\nh.add_meta_context('base:allocation')\n\
                  h.connect_uri(os.environ['uri'])\n\
                  failed, found = [], []\n\
                  for i in range(100):\n\
                  \x20 h.aio_pwrite(bytearray([i + 1] * 4096), i * 4096, lambda error: failed.append(error.value) or 1)\n\
                  while h.aio_in_flight() > 0: h.poll(-1)\n\
                  assert failed == [0] * 100, failed\n\
                  assert all(h.pread(4096, i * 4096) == bytes([i + 1] * 4096) for i in range(100))\n\
                  h.zero(300 << 10, 8192)\n\
                  assert h.pread(300 << 10, 8192) == bytes(300 << 10)\n\
                  h.block_status(1 << 20, 0, lambda context, at, runs, error: found.extend(runs) or 0)\n\
                  assert found[-1] == 3 and found[-2] >= 512 << 10, found\n";
    let client = script(&scratch, "client.py", client);
    serving(&plugin, &[], &format!("uri=\"$uri\" python3 {client}"));
});

with_plugin!(perl_is_hosted, "perl", |scratch| {
    let source = "my $disk = \"\\0\" x 1048576;\n\
                  sub open { return { } }\n\
                  sub get_size { return length $disk }\n\
                  sub pread { my ($h, $c, $o) = @_; return substr $disk, $o, $c }\n\
                  sub pwrite { my ($h, $b, $o) = @_; substr ($disk, $o, length $b) = $b; }\n\
                  sub can_write { return 1 }\n\
                  sub flush { }\n";
    let path = script(&scratch, "disk.pl", source);
    write_and_read(&format!("perl?{path}"), 1 << 20, &scratch);
});

with_plugin!(tcl_is_hosted, "tcl", |scratch| {
    let source = "proc plugin_open {readonly} { return 1 }\n\
                  proc get_size {h} { return 65536 }\n\
                  proc pread {h count offset} { return [string repeat \"t\" $count] }\n";
    let path = script(&scratch, "disk.tcl", source);
    let out = read(&format!("tcl?{path}"), &scratch);
    assert!(fs::read(out).unwrap() == vec![b't'; 65536]);
});

with_plugin!(lua_is_hosted, "lua", |scratch| {
    let source = "function open(readonly) return 1 end\n\
                  function get_size(h) return 65536 end\n\
                  function pread(h, count, offset) return string.rep('l', count) end\n";
    let path = script(&scratch, "disk.lua", source);
    let out = read(&format!("lua?{path}"), &scratch);
    assert!(fs::read(out).unwrap() == vec![b'l'; 65536]);
});

with_plugin!(info_tells_what_it_is_told, "info", |scratch| {
    let out = scratch.file("out");
    let script = format!("nbdcopy \"$uri\" {}", text(&out));
    serving("info?mode=exportname", &["--export", "a name"], &script);
    assert_eq!(fs::read(&out).unwrap(), b"a name");
    serving("info?mode=address", &[], &format!("rm {0}; nbdcopy \"$uri\" {0}", text(&out)));
    assert_eq!(fs::read(&out).unwrap(), b"unix");
});

with_plugin!(plain_generators_are_read, "null", |scratch| {
    for (plugin, check) in [
        ("null?1M", Some(0_u8)),
        ("zero", None),
        ("ones?size=1M", Some(0xff)),
        ("full?1M", Some(0)),
        ("random?1M&seed=1", None),
        ("sparse-random?8M&seed=1", None),
        ("example1", None),
        ("example2?file=/etc/hostname", None),
        ("example3?size=1M", Some(0)),
    ] {
        let name = plugin.split('?').next().unwrap();
        if !has(name) {
            continue;
        }
        let out = read(plugin, &scratch);
        let bytes = fs::read(&out).unwrap();
        if let Some(byte) = check {
            assert!(bytes.len() == 1 << 20 && bytes.iter().all(|&found| found == byte), "{plugin}");
        }
        fs::remove_file(out).unwrap();
    }
});

with_plugin!(a_full_disk_says_so, "full", |scratch| {
    let script = "! nbdsh -u \"$uri\" -c 'h.pwrite(b\"x\" * 512, 0)' 2>&1";
    let said = serving("full?1M", &[], script);
    assert!(said.contains("ENOSPC") || said.contains("No space left"), "{said}");
    drop(scratch);
});

with_plugin!(bad_parameters_are_the_plugins_own_error, "file", |scratch| {
    for (plugin, wanted) in [
        ("file?nothing=1", "unknown parameter"),
        ("file", "file"),
        ("ssh?host=127.0.0.1&port=1&path=/x", ""),
        ("none-such", "there is no plugin none-such"),
        ("null?1M&2M&a%20b=1", "is not a valid name"),
    ] {
        let output = serve_and_run(plugin, &[], "nbdinfo \"$uri\"");
        let said = lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(wanted), "{plugin}: {said}");
        assert!(!said.contains("panicked"), "{said}");
    }
    drop(scratch);
});

/// Plugins that nbdkit's versions since 1.0 compiled, from its source package.
#[test]
fn plugins_of_every_version_since_the_first_are_read_and_written() {
    let exe = std::env::current_exe().unwrap();
    let target = exe.ancestors().nth(3).unwrap();
    let folder = target.join("nbdkit/source/tests/old-plugins/x86_64/Linux");
    if !folder.is_dir() {
        skip_or_fail(&SkipReason::new(
            "nbdkit's source is absent; run `cargo xtask nbdkit-source`",
        ));
        return;
    }
    if root().is_none() {
        return;
    }
    let mut seen = Vec::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let plugin = entry.path().join("nbdkit-file-plugin.so");
        let said = done(&mut blockhaul(&["plugin", text(&plugin)]));
        let field = |name: &str| {
            let line = said.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            line.unwrap_or_default().to_string()
        };
        assert_eq!(field("name"), "file", "{said}");
        seen.push((field("struct_size"), field("api_version")));
        let scratch = ScratchDir::new().unwrap();
        let disk = scratch.file("disk");
        fs::File::create(&disk).unwrap().set_len(3 << 20).unwrap();
        let device = format!("{}?file={}", text(&plugin), text(&disk));
        write_and_read(&device, 3 << 20, &scratch);
        assert_same(&disk, &scratch.file("in"), &device);
        // Zeroes and flushes, too: each in the form that its version has.
        let script = "nbdsh -u \"$uri\" -c 'h.zero(65536, 4096)' -c 'h.flush()' \
                      -c 'assert h.pread(65536, 4096) == bytes(65536)' \
                      -c 'h.pwrite(b\"x\" * 512, 0, nbd.CMD_FLAG_FUA)'";
        serving(&device, &[], script);
        assert_eq!(&fs::read(&disk).unwrap()[..512], &[b'x'; 512]);
    }
    seen.sort();
    let wanted = ["176/1", "200/1", "264/1", "288/2", "336/2", "384/2"];
    let seen: Vec<_> = seen.iter().map(|(size, api)| format!("{size}/{api}")).collect();
    assert_eq!(seen, wanted);
}
