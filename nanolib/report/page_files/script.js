// What is picked at the top, every section, chart and table follows; the choice is in the address.
const all = (what, of = document) => [...of.querySelectorAll(what)];
const asked = new URLSearchParams(location.search), picks = all('#picks select'), drawn = new Map(), narrow = matchMedia('(max-width: 720px)');
const chosen = name => document.getElementById(name)?.value ?? '';
const wanted = plot => (plot.dataset.n ? chosen('length') : '') + narrow.matches;
let turn = 0;

async function draw(plot) {
  const length = chosen('length'), [name, at] = plot.id.split('/'), {datasets, ...spec} = specs[name][at];
  const kept = rows => rows.filter(row => !length || row.link_n == null || row.link_n == length);
  spec.datasets = Object.fromEntries(Object.entries(datasets).map(([one, rows]) => [one, kept(rows)]));
  if (narrow.matches) spec.config = {...spec.config, legend: {...spec.config.legend, columns: 2, labelLimit: 110}, axisY: {labelLimit: 130}};
  spec.description = plot.closest('figure').querySelector('figcaption').innerText;
  drawn.get(plot)?.finalize();
  const result = await vegaEmbed(plot, spec, {mode: 'vega-lite', renderer: 'svg', actions: false, logLevel: 1});
  drawn.set(plot, {of: wanted(plot), finalize: result.finalize});
  for (const group of all('[role=graphics-symbol]:not([aria-label])', plot)) group.removeAttribute('role');
}
async function follow() {
  const machine = chosen('machine'), length = chosen('length'), mine = ++turn;
  const of = one => one.dataset.n ? one.dataset.n.split(' ') : [length];  // what knows no length stays
  for (const one of all('[data-machine]')) one.hidden = machine ? one.dataset.machine !== machine : !('newest' in one.dataset);
  for (const one of all('[data-n]')) one.hidden = length && !of(one).includes(length);
  for (const one of all('details:has([data-n])')) one.querySelector('.count').textContent = all('tr[data-n]:not([hidden])', one).length;
  document.getElementById('note').hidden = !length;
  document.body.dataset.drawn = '';
  for (const plot of all('.plot')) {
    if (plot.offsetParent && drawn.get(plot)?.of !== wanted(plot)) await draw(plot);
    if (mine !== turn) return;
  }
  document.body.dataset.drawn = 'yes';
}
for (const pick of picks) {
  if (all('option', pick).some(one => one.value === asked.get(pick.id))) pick.value = asked.get(pick.id);
  pick.onchange = () => {
    const query = new URLSearchParams(picks.filter(one => one.value).map(one => [one.id, one.value]));
    history.replaceState(null, '', `${location.pathname}?${query}${location.hash}`);
    follow();
  };
}
narrow.onchange = follow;
let closed = [];
addEventListener('beforeprint', () => { closed = all('details:not([open])'); closed.forEach(one => { one.open = true; }); });
addEventListener('afterprint', () => closed.forEach(one => { one.open = false; }));
follow();
