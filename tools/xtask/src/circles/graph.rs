//! Circles of a graph.

use std::collections::BTreeSet;

/// The groups of nodes of which each reaches all others, by Tarjan's algorithm; `uses` has the successors of
/// each node. Every node is in one group, sorted.
pub fn circles(uses: &[BTreeSet<usize>]) -> Vec<Vec<usize>> {
    let mut search = Search {
        uses,
        order: vec![None; uses.len()],
        lowest: vec![0; uses.len()],
        visited: 0,
        open: Vec::new(),
        found: Vec::new(),
    };
    for node in 0..uses.len() {
        if search.order[node].is_none() {
            search.visit(node);
        }
    }
    search.found.sort();
    search.found
}

struct Search<'a> {
    uses: &'a [BTreeSet<usize>],
    /// When a node was visited.
    order: Vec<Option<usize>>,
    /// The earliest open node that a node reaches.
    lowest: Vec<usize>,
    visited: usize,
    /// Nodes that were visited and are in no group yet.
    open: Vec<usize>,
    found: Vec<Vec<usize>>,
}

impl Search<'_> {
    fn visit(&mut self, node: usize) {
        let own = self.visited;
        self.visited += 1;
        self.order[node] = Some(own);
        self.lowest[node] = own;
        self.open.push(node);
        for &next in &self.uses[node] {
            match self.order[next] {
                None => {
                    self.visit(next);
                    self.lowest[node] = self.lowest[node].min(self.lowest[next]);
                }
                Some(order) if self.open.contains(&next) => {
                    self.lowest[node] = self.lowest[node].min(order);
                }
                Some(_) => {}
            }
        }
        if self.lowest[node] == own {
            let start = self.open.iter().rposition(|open| *open == node).unwrap_or_default();
            let mut group = self.open.split_off(start);
            group.sort_unstable();
            self.found.push(group);
        }
    }
}
