//! Files of real web servers: nginx, alone, with a cache of slices before it, and with its WebDAV module; Apache with
//! WebDAV; and Caddy.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, text};

use crate::remote::{http, ports, same, start};
use crate::served_disk::{LIMIT, OURS, succeed};

/// A directory that servers without rights can use, with a disk in `files`.
fn scratch(seed: u64) -> ScratchDir {
    let scratch = ScratchDir::new().unwrap();
    let files = scratch.file("files");
    for folder in ["folder", "small", "kept"] {
        fs::create_dir_all(files.join(folder)).unwrap();
        fs::set_permissions(files.join(folder), fs::Permissions::from_mode(0o777)).unwrap();
    }
    let mut bytes = Rng::new(seed).disk(9 << 20, 300_000, 60);
    bytes.resize((12 << 20) + 7, 9);
    fs::write(files.join("a disk.raw"), bytes).unwrap();
    for folder in [scratch.path(), &files] {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).unwrap();
    }
    scratch
}

/// Reads the disk at `URL/a%20disk.raw` in each way.
fn read_all(scratch: &ScratchDir, url: &str) {
    let disk = scratch.file("files/a disk.raw");
    let (disk, url) = (disk.to_str().unwrap(), format!("{url}/a%20disk.raw"));
    let copied = scratch.file("copied.raw");
    succeed(&["copy", &url, copied.to_str().unwrap()]);
    assert!(same(Path::new(disk), &copied), "{url}");
    succeed(&["compare", &format!("{url}#connections=3"), disk]);
    fs::remove_file(copied).unwrap();
}

const NGINX: &str = "
daemon off;
master_process off;
pid nginx.pid;
error_log stderr;
events {}
http {
    access_log off;
    client_body_temp_path t1; proxy_temp_path t2; fastcgi_temp_path t3; uwsgi_temp_path t4; scgi_temp_path t5;
    proxy_cache_path cache keys_zone=slices:1m;
    log_format ranges '$request $http_range';
    server { listen 127.0.0.1:PLAIN; root files; access_log plain.log ranges; }
    server {
        listen 127.0.0.1:DAV;
        root files;
        client_max_body_size 64m;
        location / { dav_methods PUT DELETE MOVE; }
        location ~ /\\. { deny all; }
        location /small/ { dav_methods PUT DELETE MOVE; client_max_body_size 100k; }
        location /kept/ { dav_methods PUT; }
    }
    server {
        listen 127.0.0.1:CACHE;
        location / {
            slice 1m;
            proxy_cache slices;
            proxy_cache_key $uri$slice_range;
            proxy_set_header Range $slice_range;
            proxy_cache_valid 200 206 1h;
            proxy_pass http://127.0.0.1:PLAIN;
        }
    }
}
";

#[test]
fn nginx_and_its_cache_of_slices_are_read() {
    let nginx = require_peer!("nginx");
    let scratch = scratch(21);
    let [plain, cache, dav] = ports();
    let config = NGINX.replace("PLAIN", &plain.to_string()).replace("CACHE", &cache.to_string());
    let config = config.replace("DAV", &dav.to_string());
    fs::write(scratch.file("nginx.conf"), config).unwrap();
    let mut command = nginx.tied_command();
    command.args(["-e", "stderr", "-c", "nginx.conf", "-p"]).arg(scratch.path());
    let _server = start(&mut command, cache);
    // The second time from the cache.
    for port in [plain, cache, cache] {
        read_all(&scratch, &format!("http://127.0.0.1:{port}"));
    }
    reads_of_a_served_image_are_cached(&scratch, plain);
    refuse_list(&format!("dav://127.0.0.1:{plain}/"), "WebDAV");
    files_are_written(&scratch, dav);
    let disk = scratch.file("files/a disk.raw");
    let absent = format!("dav://127.0.0.1:{dav}/none/x");
    refuse_copy(&[disk.to_str().unwrap(), &absent], 5, "directory of the target");
    let kept = format!("dav://127.0.0.1:{dav}/kept/x");
    refuse_copy(&[disk.to_str().unwrap(), &kept], 3, "cannot rename files");
    let kept = kept.replace(&dav.to_string(), &plain.to_string());
    refuse_copy(&[disk.to_str().unwrap(), &kept], 3, "cannot rename files");
    // A cache may show the earlier version, but no mix.
    let before = fs::read(scratch.file("files/a disk.raw")).unwrap();
    let fresh = Rng::new(22).disk(12 << 20, 300_000, 60);
    fs::write(scratch.file("files/a disk.raw"), &fresh).unwrap();
    let url = format!("http://127.0.0.1:{cache}/a%20disk.raw");
    let copied = scratch.file("copied.raw");
    let mut command = Command::new(OURS);
    command.args(["copy", &url]).arg(&copied);
    if tools::output(&mut command, LIMIT).unwrap().status.success() {
        let found = fs::read(&copied).unwrap();
        assert!(found == before || found == fresh);
    }
}

/// As a guest reads and writes a disk whose image is behind the server (`docs/recipes.md`).
fn reads_of_a_served_image_are_cached(scratch: &ScratchDir, port: u16) {
    let disk = scratch.file("files/a disk.raw");
    let image = scratch.file("files/disk.qcow2");
    succeed(&["copy", &format!("as-qcow2:{}", disk.display()), image.to_str().unwrap()]);
    fs::set_permissions(&image, fs::Permissions::from_mode(0o644)).unwrap();
    let url = format!("qcow2:http://127.0.0.1:{port}/disk.qcow2");
    let layers = ["--layer", "cache?cache-on-read=true", "--layer", "cow"];
    let args = [&layers[..], &[&url]].concat();
    let server = PeerServer::blockhaul(OURS.as_ref(), &scratch.socket("guest"), &args).unwrap();
    // The server logs a request when it has sent all of the response.
    let requests = || {
        let count = || fs::read_to_string(scratch.file("plain.log")).unwrap().lines().count();
        loop {
            let before = count();
            std::thread::sleep(std::time::Duration::from_millis(200));
            if count() == before {
                return before;
            }
        }
    };
    let mut bytes = fs::read(&disk).unwrap();
    // Blocks with data, some of them in one cluster.
    let is_data = |at: &usize| bytes[*at..at + 4096].iter().any(|&byte| byte != 0);
    let blocks: Vec<usize> = (0..8 << 20).step_by(300 << 10).filter(is_data).take(8).collect();
    let found = scratch.file("block");
    let read = |at: usize, expected: &[u8]| {
        fs::write(&found, vec![1; (12 << 20) + 7]).unwrap();
        let range = format!("{at}:4096");
        succeed(&["copy", "--range", &range, &server.uri(""), found.to_str().unwrap()]);
        assert!(fs::read(&found).unwrap()[at..at + 4096] == expected[at..at + 4096]);
    };
    let mut sent = requests();
    for &at in &blocks {
        read(at, &bytes);
        let first = requests();
        assert!(first > sent, "the block at {at} came from nowhere");
        read(at, &bytes);
        sent = requests();
        let log = fs::read_to_string(scratch.file("plain.log")).unwrap();
        assert_eq!(sent, first, "the block at {at} was requested again: {log}");
    }
    // What was written is read without a request, too, and the image stays as it is.
    let before = fs::read(&image).unwrap();
    let at = blocks[0];
    bytes[at..at + 4096].fill(0x77);
    fs::write(&found, &bytes).unwrap();
    let range = format!("{at}:4096");
    succeed(&["copy", "--range", &range, found.to_str().unwrap(), &server.uri("")]);
    read(at, &bytes);
    assert_eq!(requests(), sent);
    assert!(fs::read(&image).unwrap() == before);
    assert!(server.stop().unwrap().success());
    fs::remove_file(&image).unwrap();
    fs::remove_file(&found).unwrap();
}

fn refuse_list(url: &str, why: &str) {
    let output = tools::output(Command::new(OURS).args(["info", "--list", url]), LIMIT).unwrap();
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains(why), "{said}");
}

const APACHE: &str = "
LoadModule mpm_event_module /usr/lib/apache2/modules/mod_mpm_event.so
LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
LoadModule dav_module /usr/lib/apache2/modules/mod_dav.so
LoadModule dav_fs_module /usr/lib/apache2/modules/mod_dav_fs.so
ServerName localhost
Listen 127.0.0.1:PORT
User #65534
Group #65534
PidFile apache.pid
ErrorLog error.log
StartServers 1
DavLockDB PLACE/locks
DocumentRoot PLACE/files
<Directory PLACE/files>
    Dav On
    Require all granted
</Directory>
# As Debian has it, for all names with a dot.
<FilesMatch \"^\\.\">
    Require all denied
</FilesMatch>
<Directory PLACE/files/small>
    LimitRequestBody 100000
</Directory>
<Directory PLACE/files/kept>
    <Limit PUT>
        Require all denied
    </Limit>
</Directory>
";

#[test]
fn apache_with_webdav_is_read_and_lists_its_files() {
    let apache = require_peer!("apache2");
    let scratch = scratch(23);
    let [port] = ports();
    let place = scratch.path().display().to_string();
    let config = APACHE.replace("PORT", &port.to_string()).replace("PLACE", &place);
    let path = scratch.file("apache.conf");
    fs::write(&path, config).unwrap();
    let mut command = apache.tied_command();
    // One process, which is ended as a whole.
    command.arg("-d").arg(scratch.path()).arg("-f").arg(path).arg("-X");
    let _server = start(&mut command, port);
    read_all(&scratch, &format!("dav://127.0.0.1:{port}"));
    let list = |url: &str| {
        let mut command = Command::new(OURS);
        let output = tools::output(command.args(["info", "--list", "--json", url]), LIMIT).unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    let url = format!("dav://127.0.0.1:{port}");
    let listed = list(&url);
    let objects = listed["objects"].as_array().unwrap();
    assert!(objects.len() == 1 && objects[0]["name"] == "a disk.raw", "{listed}");
    assert_eq!(objects[0]["size"], (12 << 20) + 7, "{listed}");
    assert!(objects[0]["etag"].is_string() && objects[0]["changed"].is_string(), "{listed}");
    assert_eq!(list(&format!("{url}/folder"))["objects"], serde_json::json!([]));
    refuse_list(&format!("{url}/none"), "404");
    refuse_list(&format!("http://127.0.0.1:{port}/"), "has no list");
    files_are_written(&scratch, port);
    apache_keeps_what_is_no_file(&scratch, port);
    the_commands_of_the_page_run(&scratch, port);
}

#[track_caller]
fn refuse_copy(words: &[&str], status: i32, why: &str) {
    let output = tools::output(Command::new(OURS).arg("copy").args(words), LIMIT).unwrap();
    let said = text(&output.stderr);
    assert!(output.status.code() == Some(status) && said.contains(why), "{words:?}: {said}");
}

/// The files of a directory of the server that copies have left.
fn left(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    names
        .map(|name| name.into_string().unwrap())
        .filter(|name| name.contains(".blockhaul-"))
        .collect()
}

/// Copies to the server in each way.
fn files_are_written(scratch: &ScratchDir, port: u16) {
    let files = scratch.file("files");
    let disk = files.join("a disk.raw");
    let (url, disk) = (format!("dav://127.0.0.1:{port}"), disk.to_str().unwrap());
    let new = format!("{url}/new%20%25%23%3F.raw");
    succeed(&["copy", "--verify", disk, &new]);
    assert!(same(Path::new(disk), &files.join("new %#?.raw")));
    // It is replaced, by several connections, and by a smaller one.
    succeed(&["copy", "-C", "4", disk, &new]);
    assert!(same(Path::new(disk), &files.join("new %#?.raw")));
    succeed(&["copy", "zero:5000", &new]);
    assert!(fs::read(files.join("new %#?.raw")).unwrap() == [0; 5000]);
    succeed(&["copy", &format!("as-qcow2:{disk}"), &format!("{url}/x.qcow2")]);
    succeed(&["compare", &format!("qcow2:{url}/x.qcow2"), disk]);
    let mut pipe = Command::new("sh");
    pipe.args(["-c", "exec \"$0\" copy - \"$1\" < \"$2\"", OURS, &new, disk]);
    let output = tools::output(&mut pipe, LIMIT).unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(same(Path::new(disk), &files.join("new %#?.raw")));
    let planned = succeed(&["copy", "--dry-run", "zero:5000", &new]);
    assert!(planned.contains("would overwrite 12582919 bytes"), "{planned}");
    let planned = succeed(&["copy", "--dry-run", disk, &format!("{url}/none.raw")]);
    assert!(planned.contains("would create"), "{planned}");
    let http = new.replace("dav:", "http:");
    refuse_copy(&[&http, &new], 2, "are the same");
    refuse_copy(&[disk, &http], 3, "read-only");
    refuse_copy(&["--journal", "j", disk, &new], 3, "cannot be continued");
    refuse_copy(&["--dry-run", "--journal", "j", disk, &new], 3, "cannot be continued");
    refuse_copy(&["--range", "0:4096", disk, &new], 3, "replaced as a whole");
    refuse_copy(&["--dry-run", "--range", "0:4096", disk, &new], 3, "replaced as a whole");
    refuse_copy(&[disk, &format!("qcow2:{url}/y.qcow2")], 3, "as a whole");
    refuse_copy(&[disk, &format!("{url}/folder")], 3, "is a directory");
    refuse_copy(&["--dry-run", disk, &format!("{url}/folder")], 3, "is a directory");
    refuse_copy(&[disk, &format!("{url}/folder/")], 2, "ends with /");
    refuse_copy(&[disk, &format!("{url}/small/x")], 6, "413");
    assert!(files.join("folder").is_dir() && same(Path::new(disk), &files.join("new %#?.raw")));
    // A copy that is killed leaves its temporary file, if the server has it, and the target as it was.
    let mut killed = Command::new(OURS);
    killed.args(["copy", "--rate", "1M", disk, &new]);
    let killed = crate::served_disk::ChildGuard(killed.spawn().unwrap());
    std::thread::sleep(std::time::Duration::from_secs(3));
    drop(killed);
    assert!(same(Path::new(disk), &files.join("new %#?.raw")));
    for folder in [files.clone(), files.join("folder"), files.join("small")] {
        for name in left(&folder) {
            assert!(name.starts_with("new____.raw.blockhaul-"), "{name}");
            fs::remove_file(folder.join(name)).unwrap();
        }
    }
}

/// What Apache says to conditions, locks and rights.
fn apache_keeps_what_is_no_file(scratch: &ScratchDir, port: u16) {
    let files = scratch.file("files");
    let disk = files.join("a disk.raw");
    let (url, disk) = (format!("dav://127.0.0.1:{port}"), disk.to_str().unwrap());
    refuse_copy(&[disk, &format!("{url}/none/x")], 3, "directory of the target does not exist");
    refuse_copy(&[disk, &format!("{url}/kept/x")], 3, "403");
    assert!(left(&files.join("kept")).is_empty());
    // The condition of the last step, as it is sent.
    fs::write(files.join("one"), "one").unwrap();
    fs::write(files.join("two"), "two").unwrap();
    let shown = http(port, "PROPFIND /two HTTP/1.1\r\nDepth: 0\r\nx-end:", b"");
    let tag = shown.split("getetag>").nth(1).unwrap().split('<').next().unwrap().to_owned();
    let place = format!("http://127.0.0.1:{port}/two");
    let move_if = |tag: &str| {
        let fields = format!("Destination: {place}\r\nOverwrite: T\r\nIf: <{place}> ([{tag}])");
        http(port, &format!("MOVE /one HTTP/1.1\r\n{fields}\r\nx-end:"), b"")
    };
    let refused = move_if("\"0-0\"");
    assert!(refused.starts_with("HTTP/1.1 412"), "{refused}");
    assert_eq!(fs::read(files.join("two")).unwrap(), b"two");
    let moved = move_if(&tag);
    assert!(moved.starts_with("HTTP/1.1 204"), "{tag}: {moved}");
    assert_eq!(fs::read(files.join("two")).unwrap(), b"one");
    let lock = "<?xml version=\"1.0\"?><D:lockinfo xmlns:D=\"DAV:\"><D:lockscope><D:exclusive/></D:lockscope>\
                <D:locktype><D:write/></D:locktype><D:owner>editor</D:owner></D:lockinfo>";
    let locked =
        http(port, "LOCK /two HTTP/1.1\r\nContent-Type: text/xml\r\nx-end:", lock.as_bytes());
    assert!(locked.starts_with("HTTP/1.1 200"), "{locked}");
    refuse_copy(&[disk, &format!("{url}/two")], 3, "locked by editor (opaquelocktoken:");
    assert_eq!(fs::read(files.join("two")).unwrap(), b"one");
    fs::create_dir(files.join("held")).unwrap();
    std::os::unix::fs::chown(files.join("held"), Some(65534), Some(65534)).ok();
    let fields = "Depth: infinity\r\nContent-Type: text/xml";
    let locked =
        http(port, &format!("LOCK /held/ HTTP/1.1\r\n{fields}\r\nx-end:"), lock.as_bytes());
    assert!(locked.starts_with("HTTP/1.1 200"), "{locked}");
    let why = "directory of the target is locked by editor (opaquelocktoken:";
    refuse_copy(&[disk, &format!("{url}/held/x")], 3, why);
    assert!(left(&files.join("held")).is_empty());
}

fn the_commands_of_the_page_run(scratch: &ScratchDir, port: u16) {
    let place = scratch.file("page");
    fs::create_dir(&place).unwrap();
    fs::copy(scratch.file("files/a disk.raw"), place.join("disk.raw")).unwrap();
    let lines = crate::remote::lines("Files of WebDAV servers");
    assert!(lines.len() > 2);
    for line in lines {
        let line = line.replace("davs://files.example.com", &format!("dav://127.0.0.1:{port}"));
        let mut command = Command::new(OURS);
        let output =
            tools::output(command.current_dir(&place).args(line.split(' ').skip(1)), LIMIT);
        let output = output.unwrap();
        assert!(output.status.success(), "{line}: {}", text(&output.stderr));
    }
}

#[test]
fn caddy_is_read() {
    let caddy = require_peer!("caddy");
    let scratch = scratch(24);
    let [port] = ports();
    let mut command = caddy.tied_command();
    command.args(["file-server", "--listen", &format!("127.0.0.1:{port}"), "--root", "files"]);
    command.current_dir(scratch.path()).env("HOME", scratch.path());
    let _server = start(&mut command, port);
    read_all(&scratch, &format!("http://127.0.0.1:{port}"));
}
