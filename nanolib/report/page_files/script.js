// The choices in the lists at the top of the page filter every finding, chart and table. The URL contains the choices.
const all = (what, of = document) => [...of.querySelectorAll(what)];
const asked = new URLSearchParams(location.search), picks = all('#picks select'), narrow = matchMedia('(max-width: 720px)');
const chosen = name => document.getElementById(name)?.value ?? '';
let queue = Promise.resolve();

// Return the panels of a chart, as wide as their container, with the rows of the chosen length.
function panelsOf({title, config, datasets, hconcat, vconcat, ...whole}, length) {
  const kept = rows => rows.filter(row => !length || row.link_n == null || row.link_n == length);
  const shown = Object.fromEntries(Object.entries(datasets).map(([name, rows]) => [name, kept(rows)]));
  if (narrow.matches) config = {...config, legend: {...config.legend, columns: 2, labelLimit: 110}, axisY: {labelLimit: 130}};
  return (hconcat ?? vconcat ?? [whole]).filter(({data}) => {
    const known = rows => rows.some(row => row.link_n != null);
    return known(shown[data.name]) || !known(datasets[data.name]);
  }).map(panel => ({...panel, config, datasets: shown, width: 'container', autosize: {type: 'fit-x', contains: 'padding'}}));
}
// Return a panel without axes and labels, for a card.
function smallOf(panel) {
  const layer = panel.layer.filter(one => one.mark.type !== 'text'), encoding = JSON.stringify(layer, (key, value) => key === 'axis' ? null : value);
  return {...panel, layer: JSON.parse(encoding), title: null, height: 64, config: {...panel.config, legend: {disable: true}}};
}
async function draw(place) {
  const small = place.className === 'mini', caption = place.previousElementSibling;
  const panels = panelsOf(specs[place.dataset.chart], chosen('length')), shown = small ? panels.slice(0, 1).map(smallOf) : panels;
  place.views?.forEach(view => view.finalize());
  place.replaceChildren(...shown.map(() => Object.assign(document.createElement('div'), {className: 'plot'})));
  const look = {mode: 'vega-lite', renderer: 'svg', actions: false}, views = [];
  for (const [at, panel] of shown.entries()) views.push((await vegaEmbed(place.children[at], {...panel, description: caption.innerText}, look)).view);
  place.views = views;
  for (const group of all('[role=graphics-symbol]:not([aria-label])', place)) group.removeAttribute('role');
}
// Draw each visible chart that does not show the current choice. If the choice changes during the call, the next call in the queue draws the remaining charts.
async function drawAll() {
  document.body.dataset.drawn = '';
  for (const place of all('[data-chart]')) {
    const key = chosen('length') + narrow.matches;
    if (!place.checkVisibility() || place.dataset.key === key) continue;
    place.dataset.key = key;
    await draw(place);
  }
  document.body.dataset.drawn = 'yes';
}
function follow() {
  const machine = chosen('machine');
  for (const one of all('[data-machine]')) one.hidden = machine ? one.dataset.machine !== machine : !('newest' in one.dataset);
  // The list of sequence lengths shows only lengths that were measured on the chosen machine.
  const here = new Set(['', ...all('section:not([hidden]) tr[data-n]').map(row => row.dataset.n)]);
  for (const one of all('#length option')) one.hidden = one.disabled = !here.has(one.value);
  if (!here.has(chosen('length'))) document.getElementById('length').value = '';
  const length = chosen('length');
  for (const one of all('tr[data-n]')) one.hidden = length && one.dataset.n !== length;
  for (const one of all('[data-only]')) {
    const at = n => one.parentElement.querySelector(`:scope > [data-only="${n}"]`);
    one.hidden = one !== (at(length) ?? at(''));
  }
  for (const one of all('details:has([data-n])')) one.querySelector('.count').textContent = all('tr:not([hidden])', one).length - 1;
  queue = queue.then(drawAll);
}
for (const pick of picks) {
  pick.value = asked.get(pick.id);
  if (pick.selectedIndex < 0) pick.value = '';  // The page has no such option.
  pick.onchange = () => {
    const query = new URLSearchParams(picks.filter(one => one.value).map(one => [one.id, one.value]));
    history.replaceState(null, '', `${location.pathname}?${query}${location.hash}`);
    follow();
  };
}
narrow.onchange = follow;
follow();
