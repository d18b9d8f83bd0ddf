// The lists at the top of the page filter every finding, chart and table.
const all = (what, of = document) => [...of.querySelectorAll(what)];
const chosen = name => document.getElementById(name)?.value ?? '', narrow = matchMedia('(max-width: 720px)'), views = [];
const tokens = () => Number(chosen('length')) || null;

// Return a panel without axes and labels, for a card.
function smallOf(panel) {
  const layer = panel.layer.filter(one => one.mark.type !== 'text'), encoding = JSON.stringify(layer, (key, value) => key === 'axis' ? null : value);
  return {...panel, layer: JSON.parse(encoding), title: null, height: 64, config: {...panel.config, legend: {disable: true}}};
}
// Draw the panels of a chart, as wide as their container. The signal `n` is the chosen length.
async function draw(place) {
  const {title, hconcat, vconcat, ...whole} = specs[place.dataset.chart], small = place.className === 'mini';
  const config = {...whole.config, axisY: {labelLimit: {expr: 'narrow ? 150 : 340'}}, legend: {...whole.config.legend, columns: {expr: 'narrow ? 2 : 0'}, labelLimit: {expr: 'narrow ? 90 : 160'}}};
  const shared = {
    ...whole, config, width: 'container', autosize: {type: 'fit-x', contains: 'padding'}, description: place.previousElementSibling.innerText,
    params: [{name: 'n', value: tokens()}, {name: 'narrow', value: narrow.matches}], transform: [{filter: '!n || datum.link_n == null || datum.link_n == n'}],
  };
  const panels = (hconcat ?? vconcat ?? [{}]).map(panel => ({...panel, ...shared}));
  if (vconcat) place.style.gridTemplateColumns = 'repeat(auto-fit, minmax(min(100%, 480px), 1fr))';
  for (const panel of small ? [smallOf(panels[0])] : panels) {
    const at = place.appendChild(Object.assign(document.createElement('div'), {className: 'plot'}));
    views.push((await vegaEmbed(at, panel, {mode: 'vega-lite', renderer: 'svg', actions: false})).view);
  }
  for (const group of all('[role=graphics-symbol]:not([aria-label])', place)) group.removeAttribute('role');
}
async function follow() {
  const machine = chosen('machine');
  for (const one of all('[data-machine]')) one.hidden = machine ? one.dataset.machine !== machine : !('newest' in one.dataset);
  // The list of sequence lengths shows only lengths that were measured on the chosen machine.
  const here = new Set(['', ...all('section:not([hidden]) tr[data-n]').map(row => row.dataset.n)]);
  for (const one of all('#length option')) one.hidden = one.disabled = !here.has(one.value);
  if (!here.has(chosen('length'))) document.getElementById('length').value = '';
  const n = chosen('length');
  for (const one of all('tr[data-n]')) one.hidden = n && one.dataset.n !== n;
  for (const one of all('[data-only]')) {
    const at = value => one.parentElement.querySelector(`:scope > [data-only="${value}"]`);
    one.hidden = one !== (at(n) ?? at(''));
  }
  for (const one of all('details:has([data-n])')) one.querySelector('.count').textContent = all('tr:not([hidden])', one).length - 1;
  await Promise.all(views.map(view => view.signal('n', tokens()).signal('narrow', narrow.matches).runAsync()));
  dispatchEvent(new Event('resize'));  // A part that was hidden had no width.
  document.body.dataset.drawn = n + machine;  // Tests wait for this choice.
}
for (const pick of [...all('#picks select'), narrow]) pick.onchange = follow;
follow().then(async () => {
  for (const place of all('[data-chart]')) await draw(place);
  await follow();
  document.body.dataset.ready = 'yes';  // Tests wait for all charts.
});
