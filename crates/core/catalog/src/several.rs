//! Several named storages, as the exports of one server.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use crate::{Export, ExportClient, Exports, ListedExport, OpenFuture, Visit};
use blockhaul_block::{Error, Kind, Result};

/// Named storages. The empty name selects the storage of that name, or else the first one.
///
/// A storage that itself has exports appears with each of them: its default one under its own name,
/// the others after that and a slash (`vms/a.img`), or unchanged if the storage has the empty name.
///
/// A single storage is served unchanged: its exports have the names that it gives them, unless the names are full
/// ([`NamedStorages::with_full_names`]).
///
/// Storages can be added and removed at any time. A client sees those that exist when it connects,
/// until they are removed: it keeps nothing open that it has not opened. A storage that is hidden is for clients as one
/// that is not there: names that it would serve lead to another storage that has them.
#[derive(Default)]
pub struct NamedStorages {
    storages: RwLock<Arc<[Arc<StorageEntry>]>>,
    full_names: bool,
}

/// A named storage.
pub struct NamedStorage {
    /// Its name.
    pub name: String,
    /// For users; empty: its own.
    pub description: String,
    /// What it opens.
    pub exports: Arc<dyn Exports>,
    /// It is one device, without exports of its own.
    pub single: bool,
}

/// One of several storages.
struct StorageEntry {
    name: String,
    description: String,
    single: bool,
    /// Whether clients do not find it now.
    hidden: AtomicBool,
    /// None: it was removed. Clients that connected before may know it for as long as they stay.
    exports: RwLock<Option<Arc<dyn Exports>>>,
}

impl StorageEntry {
    fn new(named: NamedStorage) -> StorageEntry {
        let NamedStorage { name, description, exports, single } = named;
        let hidden = AtomicBool::new(false);
        StorageEntry { name, description, single, hidden, exports: RwLock::new(Some(exports)) }
    }

    /// What clients open; `None`: they do not find it.
    fn exports(&self) -> Option<Arc<dyn Exports>> {
        if self.hidden.load(Ordering::Acquire) {
            return None;
        }
        self.exports.read().expect("no panic under this lock").clone()
    }

    fn is_there(&self) -> bool {
        self.exports().is_some()
    }

    fn remove(&self) {
        let exports = self.exports.write().expect("no panic under this lock").take();
        // Not under the lock: it may take long.
        drop(exports);
    }
}

impl NamedStorages {
    /// Combines storages, in the order in which they are listed.
    ///
    /// # Errors
    /// Two storages of one name.
    pub fn new(storages: Vec<NamedStorage>) -> Result<NamedStorages> {
        let several = NamedStorages::default();
        for one in storages {
            several.add(one)?;
        }
        Ok(several)
    }

    /// No storages yet. The exports of each have its name before theirs, also while it is the only one.
    pub fn with_full_names() -> NamedStorages {
        NamedStorages { full_names: true, ..NamedStorages::default() }
    }

    /// Adds a storage after the others, for clients that connect from now on.
    ///
    /// # Errors
    /// [`Kind::Usage`] if there is one of the same name.
    pub fn add(&self, storage: NamedStorage) -> Result<()> {
        self.insert(StorageEntry::new(storage))
    }

    /// Adds a storage as [`NamedStorages::add`] does, which no client finds until [`NamedStorages::show`].
    ///
    /// # Errors
    /// [`Kind::Usage`] if there is one of the same name.
    pub fn add_hidden(&self, storage: NamedStorage) -> Result<()> {
        let entry = StorageEntry::new(storage);
        entry.hidden.store(true, Ordering::Release);
        self.insert(entry)
    }

    /// Hides the storage of this name. Clients keep what they have already opened.
    pub fn hide(&self, name: &str) {
        self.set_hidden(name, true);
    }

    /// Ends [`NamedStorages::hide`], also for clients that have connected since.
    pub fn show(&self, name: &str) {
        self.set_hidden(name, false);
    }

    fn set_hidden(&self, name: &str, hidden: bool) {
        let all = self.storages();
        let found = all.iter().filter(|one| one.name == name);
        found.for_each(|one| one.hidden.store(hidden, Ordering::Release));
    }

    fn insert(&self, storage: StorageEntry) -> Result<()> {
        let mut all = self.storages.write().expect("no panic under this lock");
        if all.iter().any(|one| one.name == storage.name) {
            let text = format!("two exports have the name {:?}: choose another", storage.name);
            return Err(Error::new(Kind::Usage, text));
        }
        *all = all.iter().cloned().chain([Arc::new(storage)]).collect();
        Ok(())
    }

    /// Removes the storage of this name. Clients keep what they have already opened; others do not
    /// find it any more. `false` if there is none.
    pub fn remove(&self, name: &str) -> bool {
        let mut all = self.storages.write().expect("no panic under this lock");
        let found = all.iter().find(|one| one.name == name).cloned();
        *all = all.iter().filter(|one| one.name != name).cloned().collect();
        drop(all);
        found.inspect(|storage| storage.remove()).is_some()
    }

    fn storages(&self) -> Arc<[Arc<StorageEntry>]> {
        self.storages.read().expect("no panic under this lock").clone()
    }
}

impl Exports for NamedStorages {
    fn admit(&self, client: ExportClient) -> OpenFuture<Arc<dyn Visit>> {
        let storages = self.storages();
        if let [only] = &*storages
            && !self.full_names
            && let Some(exports) = only.exports()
        {
            return exports.admit(client);
        }
        let visit =
            NamedStoragesVisit(Arc::new(VisitState { storages, client, visits: Mutex::default() }));
        Box::pin(std::future::ready(Ok(Arc::new(visit) as Arc<dyn Visit>)))
    }
}

struct NamedStoragesVisit(Arc<VisitState>);

struct VisitState {
    storages: Arc<[Arc<StorageEntry>]>,
    client: ExportClient,
    /// Visits to the storages that the client uses, by index: to those that it has listed, until it
    /// opens an export; then to the storage of that one.
    visits: Mutex<BTreeMap<usize, Arc<dyn Visit>>>,
}

impl VisitState {
    /// The storage of this name, and the name of the export in it.
    fn find<'name>(&self, name: &'name str) -> Option<(usize, &'name str)> {
        let all = || self.storages.iter().enumerate().filter(|(_, one)| one.is_there());
        if let Some((index, _)) = all().find(|(_, one)| one.name == name) {
            return Some((index, ""));
        }
        if name.is_empty() {
            return all().next().map(|(index, _)| (index, ""));
        }
        let behind = all().filter(|(_, one)| !one.single);
        let behind = behind.filter_map(|(index, one)| {
            if one.name.is_empty() {
                Some((index, name))
            } else {
                Some((index, name.strip_prefix(&one.name)?.strip_prefix('/')?))
            }
        });
        // The longest own name: the empty name matches everything.
        behind.min_by_key(|(_, below)| below.len())
    }

    /// The client's visit to a storage, which admits the client on first use. None: the storage was
    /// removed.
    async fn visit(&self, index: usize) -> Result<Option<Arc<dyn Visit>>> {
        let Some(exports) = self.storages[index].exports() else { return Ok(None) };
        let known = self.visits.lock().expect("no panic under this lock").get(&index).cloned();
        if known.is_some() {
            return Ok(known);
        }
        let admitted = exports.admit(self.client.clone()).await?;
        let mut visits = self.visits.lock().expect("no panic under this lock");
        Ok(Some(visits.entry(index).or_insert(admitted).clone()))
    }

    /// Ends the visits to other storages: they would keep open what is removed later.
    fn leave_others(&self, index: usize) {
        let mut visits = self.visits.lock().expect("no panic under this lock");
        let kept = visits.remove(&index).map(|visit| (index, visit));
        let others = std::mem::replace(&mut *visits, kept.into_iter().collect());
        drop(visits);
        drop(others);
    }

    async fn open(&self, name: &str, tls: bool) -> Result<Option<Export>> {
        let Some((index, below)) = self.find(name) else { return Ok(None) };
        let Some(visit) = self.visit(index).await? else { return Ok(None) };
        let Some(mut export) = visit.open(below, tls).await? else { return Ok(None) };
        self.leave_others(index);
        let one = &self.storages[index];
        export.name = match (one.name.as_str(), below) {
            // Its default export.
            (own, "") if one.single || !own.is_empty() => own.to_string(),
            (own, _) => joined(own, &export.name),
        };
        if one.single && !one.description.is_empty() {
            export.description = Some(one.description.clone());
        }
        Ok(Some(export))
    }

    async fn list(&self, tls: bool) -> Result<Vec<ListedExport>> {
        let mut all = Vec::new();
        for (index, one) in self.storages.iter().enumerate() {
            let below = match self.visit(index).await {
                Ok(Some(visit)) => visit.list(tls).await?,
                Ok(None) => continue,
                // Skip a storage that rejects this client.
                Err(error) => {
                    log::debug!(
                        export = one.name, error = error.text();
                        "export {:?} is not listed: {error}", one.name
                    );
                    continue;
                }
            };
            for listed in below {
                let below = if one.single { "" } else { listed.name.as_str() };
                let name = joined(&one.name, below);
                let own = one.single && !one.description.is_empty();
                let description = if own { one.description.clone() } else { listed.description };
                all.push(ListedExport { name, description });
            }
        }
        Ok(all)
    }
}

/// The name of a storage's export: the storage's name, then the name in it.
fn joined(own: &str, below: &str) -> String {
    match (own, below) {
        (own, "") => own.to_string(),
        ("", below) => below.to_string(),
        (own, below) => format!("{own}/{below}"),
    }
}

impl Visit for NamedStoragesVisit {
    fn list(&self, tls: bool) -> OpenFuture<Vec<ListedExport>> {
        let inside = self.0.clone();
        Box::pin(async move { inside.list(tls).await })
    }

    fn open(&self, name: &str, tls: bool) -> OpenFuture<Option<Export>> {
        let inside = self.0.clone();
        let name = name.to_string();
        Box::pin(async move { inside.open(&name, tls).await })
    }

    fn gone(&self) {
        let visits = self.0.visits.lock().expect("no panic under this lock").clone();
        visits.values().for_each(|visit| visit.gone());
    }

    fn unreachable(&self) {
        let visits = self.0.visits.lock().expect("no panic under this lock").clone();
        visits.values().for_each(|visit| visit.unreachable());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct NullDevice;

    impl blockhaul_block::Device for NullDevice {
        fn facts(&self) -> Arc<blockhaul_block::Facts> {
            Arc::new(blockhaul_block::Facts::new("nothing", 512))
        }

        fn submit(&self, _request: blockhaul_block::Request) -> blockhaul_block::PendingRequest {
            Error::new(Kind::Unsupported, "nothing is done here").into()
        }
    }

    /// The result of work that has nothing to wait for.
    fn at_once<T>(work: impl Future<Output = T>) -> T {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::pin!(work).poll(&mut context) {
            std::task::Poll::Ready(done) => done,
            std::task::Poll::Pending => panic!("nothing has to be awaited here"),
        }
    }

    fn inside(names: &[(&str, bool)]) -> VisitState {
        let storages = names.iter().map(|&(name, single)| {
            Arc::new(StorageEntry::new(NamedStorage {
                name: name.to_string(),
                description: String::new(),
                exports: Arc::new(NamedStorages::new(Vec::new()).unwrap()),
                single,
            }))
        });
        let storages = storages.collect();
        VisitState { storages, client: ExportClient::default(), visits: Mutex::default() }
    }

    #[test]
    fn names_lead_to_storages() {
        let all = inside(&[("a", true), ("d", false), ("d/x", true)]);
        assert_eq!(all.find("a"), Some((0, "")));
        assert_eq!(all.find(""), Some((0, "")), "the first one");
        assert_eq!(all.find("d"), Some((1, "")));
        assert_eq!(all.find("d/y"), Some((1, "y")));
        assert_eq!(all.find("d/x"), Some((2, "")), "its own name");
        assert_eq!(all.find("d/y/z"), Some((1, "y/z")), "to be judged there");
        for unknown in ["b", "a/", "a/x", "/a", "dx", "..", "d.."] {
            assert_eq!(all.find(unknown), None, "{unknown}");
        }
        // In any order.
        let all = inside(&[("", false), ("d", false), ("d/e", false), ("f", false)]);
        let found = ["x/a", "d/a", "d/e/a", "d/e", "f/a"].map(|name| all.find(name).unwrap());
        assert_eq!(found, [(0, "x/a"), (1, "a"), (2, "a"), (2, ""), (3, "a")]);
        let all = inside(&[("a", true), ("", true)]);
        assert_eq!(all.find(""), Some((1, "")));
        assert_eq!(all.find("b"), None);
        assert_eq!(inside(&[("a", true), ("", false)]).find("b"), Some((1, "b")));
    }

    #[test]
    fn an_open_export_has_its_own_name_and_that_of_its_storage() {
        let named = |name: &str, single: bool| NamedStorage {
            name: name.to_string(),
            description: "text".to_string(),
            exports: crate::SharedDevice::under_any_name("", "", Arc::new(NullDevice)),
            single,
        };
        let storages =
            [named("a", true), named("d", false)].map(StorageEntry::new).map(Arc::new).into();
        let all =
            VisitState { storages, client: ExportClient::default(), visits: Mutex::default() };
        let open = |name: &str| at_once(all.open(name, false)).unwrap();
        for (asked, name, description) in [
            ("", "a", Some("text")),
            ("a", "a", Some("text")),
            ("d", "d", None),
            ("d/x", "d/x", None),
        ] {
            let export = open(asked).unwrap();
            assert_eq!((export.name.as_str(), export.description.as_deref()), (name, description));
        }
        assert!(open("b").is_none());
    }

    #[test]
    fn names_are_given_once() {
        let named = |name: &str| NamedStorage {
            name: name.to_string(),
            description: String::new(),
            exports: Arc::new(NamedStorages::new(Vec::new()).unwrap()),
            single: true,
        };
        assert!(NamedStorages::new(vec![named("a"), named("")]).is_ok());
        let error = NamedStorages::new(vec![named("a"), named("b"), named("a")]).err().unwrap();
        assert!(error.text().contains("\"a\""), "{error}");
        let several = NamedStorages::new(vec![named("a")]).unwrap();
        let before = several.storages();
        several.add(named("b")).unwrap();
        assert!(several.add(named("b")).is_err());
        assert!(several.remove("a") && !several.remove("a"));
        assert_eq!((before.len(), several.storages()[0].name.as_str()), (1, "b"));
    }

    /// A storage that is not shown yet takes no name from one that is.
    #[test]
    fn names_of_a_hidden_storage_lead_to_others() {
        let named = |name: &str, single: bool| NamedStorage {
            name: name.to_string(),
            description: String::new(),
            exports: crate::SharedDevice::under_any_name("", "", Arc::new(NullDevice)),
            single,
        };
        let several = NamedStorages::new(vec![named("", false)]).unwrap();
        several.add_hidden(named("images", false)).unwrap();
        assert!(several.add(named("images", true)).is_err(), "its name is taken");
        let storages = several.storages();
        let all =
            VisitState { storages, client: ExportClient::default(), visits: Mutex::default() };
        assert_eq!(all.find("images/a"), Some((0, "images/a")));
        several.show("images");
        assert_eq!((all.find("images/a"), all.find("images")), (Some((1, "a")), Some((1, ""))));
        several.hide("images");
        assert_eq!(all.find("images"), Some((0, "images")));
        several.hide("");
        assert_eq!((all.find("x"), at_once(all.list(false)).unwrap().len()), (None, 0));
    }

    #[test]
    fn a_removed_storage_is_released_while_clients_use_others() {
        let devices = [(); 3].map(|()| Arc::new(NullDevice) as Arc<dyn blockhaul_block::Device>);
        let named = |name: &str, device: &Arc<dyn blockhaul_block::Device>| NamedStorage {
            name: name.to_string(),
            description: String::new(),
            exports: crate::SharedDevice::new(name, "", device.clone()),
            single: true,
        };
        let all =
            ["a", "b", "c"].into_iter().zip(&devices).map(|(name, device)| named(name, device));
        let several = NamedStorages::new(all.collect()).unwrap();
        let used = |device: &Arc<dyn blockhaul_block::Device>| Arc::strong_count(device) - 1;
        let client = at_once(several.admit(ExportClient::default())).unwrap();
        assert_eq!(at_once(client.list(false)).unwrap().len(), 3);
        let open = |name: &str| at_once(client.open(name, false)).unwrap();
        let export = open("b").unwrap();
        assert!(several.remove("a"));
        assert_eq!(used(&devices[0]), 0);
        assert!(open("a").is_none() && open("").is_some_and(|export| export.name == "b"));
        assert_eq!(at_once(client.list(false)).unwrap().len(), 2);
        // The client keeps what it has opened.
        assert!(several.remove("b"));
        assert!(open("b").is_none());
        assert!(used(&devices[1]) > 0);
        drop(export);
        assert!(open("c").is_some());
        assert_eq!(used(&devices[1]), 0);
    }
}
